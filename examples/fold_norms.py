"""An operation of one's own that needs two tensors at once: `penstock convert SRC DST --op fold_norms:FoldNorms`."""

import re

import torch

from penstock.jobs.operations.operation import FLOATS, all_of, as_it_is, one, specs_of, whole
from penstock.plan.tasks import Output, Recipe

BEFORE = ((r"self_attn\.[qkv]_proj", "input_layernorm"), (r"mlp\.(gate|up)_proj", "post_attention_layernorm"))


class FoldNorms:
    """The weights of norms multiplied into the linear layers that follow them; the norms become ones."""

    name = "fold-norms"

    def recipes(self, sources):
        specs = {spec.name: spec for spec in specs_of(one(sources, self.name))}
        return [self.recipe(spec, specs) for spec in specs.values()]

    def recipe(self, spec, specs):
        for linear, norm in BEFORE:
            found = specs.get(re.sub(linear, norm, spec.name))
            if found is not None and found is not spec and spec.dtype in FLOATS:
                # Rows of the weight, whichever a task is given, and all of the norm.
                inputs = (whole(0, spec), all_of(0, found))
                return Recipe(outputs=(Output(spec=spec),), inputs=inputs, num_rows=spec.shape[0])
        return as_it_is(0, spec)

    def run(self, recipe, start, stop, inputs):
        if len(inputs) == 2:
            weight, norm = inputs
            return [(weight.float() * norm.float()).to(weight.dtype)]
        is_norm = any(norm in recipe.outputs[0].spec.name for _, norm in BEFORE)
        return [torch.ones_like(inputs[0]) if is_norm else inputs[0]]

    def config(self, config):
        return config
