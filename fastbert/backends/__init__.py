"""Backends: namespaces of `<op>_fwd` and `<op>_bwd` with the contracts' signatures; chosen by `dispatch`."""
