# SPDX-License-Identifier: Apache-2.0
"""Computes hidden states of the demo models with MLX, an implementation of another project, in f32
on the weights of the GGUF file. Prints them as JSON: for each text its tokens, the state of the
last token and the mean of all states.

pip install mlx[cpu]==0.32.4 mlx-lm==0.32.2 gguf==0.19.0 numpy==2.4.6
usage: make.py MODEL.gguf > NAME.json
"""
import json
import sys

import gguf
import mlx.core as mx
from mlx_lm.models.qwen3 import Model, ModelArgs

TEXTS = [[0, 300], [0] + [(7 * i * i + 11) % 4000 + 5 for i in range(60)], [0] + list(range(100, 117))]
NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def mlx_name(name):
    *block, part, _ = name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{NAMES[part]}.weight"


reader = gguf.GGUFReader(sys.argv[1])
key = lambda name: reader.fields[f"qwen3.{name}"].contents()
weights = {
    mlx_name(tensor.name): mx.array(gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors
}
vocabulary, width = weights["model.embed_tokens.weight"].shape
model = Model(ModelArgs(
    model_type="qwen3", hidden_size=width, num_hidden_layers=key("block_count"),
    intermediate_size=key("feed_forward_length"), num_attention_heads=key("attention.head_count"),
    num_key_value_heads=key("attention.head_count_kv"), head_dim=key("attention.key_length"),
    rms_norm_eps=key("attention.layer_norm_rms_epsilon"), vocab_size=vocabulary,
    max_position_embeddings=key("context_length"), rope_theta=key("rope.freq_base"), tie_word_embeddings=True,
))
model.load_weights(list(weights.items()))
made = []
for tokens in TEXTS:
    states = model.model(mx.array([tokens]))[0]
    rounded = lambda values: [float(f"{value:.6g}") for value in values.tolist()]
    made.append({"tokens": tokens, "last": rounded(states[-1]), "mean": rounded(states.mean(axis=0))})
print("[\n" + ",\n".join(json.dumps(entry) for entry in made) + "\n]")
