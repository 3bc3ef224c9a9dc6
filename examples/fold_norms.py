"""A custom operation that needs two tensors at once: `penstock convert SRC DST --op fold_norms:FoldNorms`."""

import torch

from penstock.errors import PlanError
from penstock_convert.operations.operation import FLOATS, all_of, copy_recipe, only_source, specs_of, whole
from penstock_convert.plan.tasks import Recipe, TaskOutput

FOLLOWERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


class FoldNorms:
    """Multiplies the weights of norms into the linear layers after them. The norms become ones."""

    name = "fold-norms"

    def recipes(self, sources):
        specs = {spec.name: spec for spec in specs_of(only_source(sources, self.name))}
        norm_of = {}
        for name in specs:
            layer, _, module = name.removesuffix(".weight").rpartition(".")
            for follower in FOLLOWERS.get(module, ()):
                norm_of[f"{layer}.{follower}.weight"] = specs[name]
        # A norm becomes ones, so every layer that reads its output must contain its weight.
        quantised = [name for name in norm_of if name not in specs or specs[name].dtype not in FLOATS]
        if quantised:
            message = f"fold-norms: {len(quantised)} layers after a norm are missing or no floats: {quantised[:3]}"
            raise PlanError(message, hint="dequantise first: --op dequantise --op fold_norms:FoldNorms")
        return [self.recipe(spec, norm_of.get(spec.name)) for spec in specs.values()]

    def recipe(self, spec, norm):
        if norm is None:
            return copy_recipe(0, spec)
        # A task gets some rows of the weight, and the whole norm.
        inputs = (whole(0, spec), all_of(0, norm))
        return Recipe(outputs=(TaskOutput(spec=spec),), inputs=inputs, num_rows=spec.shape[0])

    def run(self, recipe, start, stop, inputs):
        if len(inputs) == 2:
            weight, norm = inputs
            return [(weight.float() * norm.float()).to(weight.dtype)]
        module = recipe.outputs[0].spec.name.removesuffix(".weight").rpartition(".")[2]
        return [torch.ones_like(inputs[0]) if module in FOLLOWERS else inputs[0]]

    def config(self, config):
        return config
