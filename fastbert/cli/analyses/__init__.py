"""What `fastbert analyze` computes, one file per question: a function from a model and texts to numbers,
arrays and figures.
"""
