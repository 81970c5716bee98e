"""Context parallelism for Hugging Face models.

    from spanwise.integrations import transformers as hf

    hf.context_parallel(model, mesh["cp"])
    model(**batch).loss.backward()

Models take whole batches, the same on all ranks of the cp mesh. What cannot be exact is refused.
"""

try:
    import accelerate as _accelerate  # type: ignore[import-untyped]  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "spanwise.integrations.transformers needs transformers and accelerate: pip install 'spanwise[transformers]'"
    ) from error

from spanwise.integrations.transformers.inputs import prepare
from spanwise.integrations.transformers.masks import make_plan
from spanwise.integrations.transformers.model import context_parallel
from spanwise.integrations.transformers.trainer import trainer
from spanwise.integrations.transformers.verify import verify

__all__ = ["context_parallel", "make_plan", "prepare", "trainer", "verify"]
