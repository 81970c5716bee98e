"""Values of nodes, ``meta["val"]``: sizes, dtypes and aliases."""

from __future__ import annotations

import operator

from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import Role, Traits, tensors_in

NO_VALUE = (
    'it has no meta["val"], which gives sizes and aliases. Pickled graphs lose it, ShapeProp makes only "tensor_meta", '
    "and torch.export omits it for nodes that it adds. Make it with torch.fx.passes.fake_tensor_prop.FakeTensorProp("
    "gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)"
)


def lacks_value(node: fx.Node, known: Traits) -> bool:
    """Whether a call has no value and needs one: it may return tensors."""
    if "val" in node.meta or (known.role is Role.BARRIER and not node.users):
        return False
    if isinstance(node.target, _torch.OpOverload):
        return any("Tensor" in str(result.type) for result in node.target._schema.returns)
    if node.target is operator.getitem:  # tracing gives items that are no tensors no value: None, sizes
        source, key = node.args
        whole = source.meta.get("val") if isinstance(source, fx.Node) else None
        if isinstance(whole, (list, tuple)) and isinstance(key, int) and key < len(whole):
            return bool(tensors_in(whole[key]))
    return True
