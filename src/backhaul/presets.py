"""Rules under names that people know: plain dicts, to be used as they are, merged, or copied and changed.

Covers: ``norms_and_activations``, and the words of Megatron-Core for the modules of two models as transformers writes them.
Does not cover: what a glob or a rule means (globs.py, resolving.py), or which to choose (docs/choosing.md).

>>> import backhaul.presets as presets
>>> plan = {**presets.norms_and_activations, presets.qwen3_moe["expert_fc1"]: "offload"}
"""

# By name, since nothing else is known where plans are made. One rule, so that a model may lack some of them. Left out is `_norm` after an
# h: a batch_norm writes its statistics and cannot be run twice.
norms_and_activations = {
    "{"
    "{*.,}{norm,ln}{,[0-9],_[0-9],_f,_out,_q,_pre,_post},"
    "*{layernorm,LayerNorm,rmsnorm,RMSNorm,[!h]_norm}{,[0-9],_[0-9],_before,_after,_embedding},"
    "{*.,}{act,act_fn,activation,activation_fn,activation_function,gelu,silu,swish}{,[0-9]},"
    "*{_act,_act_fn}"
    "}": "recompute",
}

# What Megatron-Core's --offload-modules and --recompute-modules call the parts of a layer, and the modules that do this work here. In this
# order each can be a rule of its own: what is inside something else comes first. `core_attn` has no module here: the attention function
# runs in `self_attn` itself, so its glob covers the projections, too, unless a rule before it does. Nor has `expert_fc1`: the experts are
# one module that holds all their weights, so its glob covers the second product as well.
qwen3_moe = {
    "attn_norm": "*.input_layernorm",
    "qkv_linear": "*.self_attn.{q,k,v}_proj",
    "attn_proj": "*.self_attn.o_proj",
    "core_attn": "*.self_attn",
    "mlp_norm": "*.post_attention_layernorm",
    "moe_act": "*.mlp.experts.act_fn",
    "expert_fc1": "*.mlp.experts",
}

deepseek_v3 = {
    "attn_norm": "*.input_layernorm",
    "mla_up_proj": "*.self_attn.{q_b_proj,kv_b_proj}",
    "qkv_linear": "*.self_attn.{q_proj,q_a_proj,q_a_layernorm,q_b_proj,kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj}",
    "attn_proj": "*.self_attn.o_proj",
    "core_attn": "*.self_attn",
    "mlp_norm": "*.post_attention_layernorm",
    "moe_act": "*.mlp.experts.act_fn",
    "expert_fc1": "*.mlp.experts",
    "shared_experts": "*.mlp.shared_experts",
}
