"""A small treebank, written by hand, with the words of the tests' tokenizers; and files like it."""

from __future__ import annotations

# form, UPOS, head, relation, and features where they matter
TREES = (
    "the DET 2 det | cat NOUN 3 nsubj | sat VERB 0 root | on ADP 6 case | the DET 6 det | mat NOUN 3 obl "
    "| . PUNCT 3 punct",
    "a DET 3 det | big ADJ 3 amod | dog NOUN 4 nsubj | ran VERB 0 root | to ADP 7 case | a DET 7 det "
    "| tree NOUN 4 obl | , PUNCT 11 punct | and CCONJ 11 cc | it PRON 11 nsubj | rained VERB 4 conj "
    "| ! PUNCT 4 punct",
    "it PRON 2 nsubj | rained VERB 0 root",
    "rain NOUN 0 root",
    "the DET 2 det | dogs NOUN 3 nsubj:pass | sat VERB 0 root | the DET 5 det | cats NOUN 3 obj",
    "it PRON 2 nsubj | ran VERB 0 root | it PRON 2 iobj | the DET 6 det | cat PROPN 6 nmod:poss "
    "| house NOUN 2 obj | not PART 2 advmod Polarity=Neg",
    "never ADV 2 advmod | sat VERB 0 root | the DET 4 det | big ADJ 2 obj | while SCONJ 6 mark "
    "| rained VERB 2 advcl | and CCONJ 9 cc | the DET 9 det | cats NOUN 2 conj",
    "no INTJ 3 discourse | , PUNCT 1 punct | it PRON 0 root | no DET 5 det | dog NOUN 3 obj",
)


def block(tree: str) -> str:
    """The lines of one sentence."""
    lines = []
    for number, word in enumerate(tree.split("|"), 1):
        form, upos, head, relation, *features = word.split()
        lines.append(
            "\t".join([str(number), form, form, upos, "_", *(features or "_"), head, relation, "_", "_"])
        )
    return "\n".join(lines) + "\n"


def conllu(trees=TREES) -> str:
    """A file."""
    return "".join(f"# text {i}\n{block(tree)}\n" for i, tree in enumerate(trees))
