// SPDX-License-Identifier: Apache-2.0

//! Tests `models::validate`: how it describes valid models, and how it refuses models that cannot
//! be run.

use gguf::{Metadata, MetadataBuilder, TensorInfo, ToValue};
use models::testing::{ModelFile, tree_data};
use models::{BuildModelError, ForwardLimits, ModelDescription, TensorHead, validate};
use ops::KvTypes;
use quant::DType;

fn qwen3() -> ModelFile {
    ModelFile::open(&tree_data().join("qwen3.Q4_K_M.gguf")).expect("a file of the tree")
}

fn run(metadata: &Metadata, tensors: &[TensorInfo]) -> Result<ModelDescription, BuildModelError> {
    let heads = tensors.iter();
    validate(metadata, heads.map(|t| TensorHead { name: &t.name, dtype: t.dtype, dims: &t.dims }))
}

/// The error, with its sources, of the qwen3 model with `key` replaced. If `value` is `None`, the
/// key is removed.
fn with_key(key: &str, value: Option<impl ToValue>) -> String {
    let file = qwen3();
    let mut builder = MetadataBuilder::default();
    builder.copy(file.header().metadata(), |other| other != key).expect("keys of a valid file");
    if let Some(value) = value {
        builder.put(key, value).expect("a key once");
    }
    let metadata = Metadata::parse(builder.bytes().to_vec()).expect("a valid section");
    text(run(&metadata, file.header().tensors()))
}

fn with_tensors(change: impl FnOnce(&mut Vec<TensorInfo>)) -> Result<ModelDescription, BuildModelError> {
    let file = qwen3();
    let mut tensors = file.header().tensors().to_vec();
    change(&mut tensors);
    run(file.header().metadata(), &tensors)
}

fn text(result: Result<ModelDescription, BuildModelError>) -> String {
    format!("{:#}", anyhow::Error::from(result.expect_err("a refusal")))
}

fn named<'a>(tensors: &'a mut [TensorInfo], name: &str) -> &'a mut TensorInfo {
    tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor of the model")
}

#[test]
fn a_description_tells_what_a_worker_must_reserve() {
    let description = with_tensors(|_| ()).expect("a valid model");
    assert_eq!(description.architecture, "qwen3");
    assert_eq!((description.vocab_size, description.context_length), (256, 4096));
    assert_eq!((description.layers, description.heads, description.kv_heads), (2, 4, 1));
    let layers = description.kv_layers(&KvTypes::default());
    assert_eq!(layers.len(), 2);
    assert_eq!(layers[0].token_bytes(), 2 * 64 * 2);
    assert_eq!(description.unread_tensors, Vec::<String>::new());
    // Widths per row: residual, normed and delta 256; queries and mixed 256; keys and values 64;
    // two tensors of the feed-forward block 256. Widths per output: selected rows 256, logits
    // 256.
    assert_eq!(description.workspace_row_widths, [256, 256, 256, 256, 64, 64, 256, 256, 256]);
    assert_eq!(description.workspace_output_widths, [256, 256]);
    let limits = ForwardLimits { rows_max: 10, outputs_max: 2 };
    let bytes: u64 = description.workspace_tensors(limits).sum();
    assert_eq!(bytes, 4 * (10 * 1920 + 2 * 512));
}

#[test]
fn unknown_architectures_are_refused_with_the_known_ones() {
    assert_eq!(
        with_key("general.architecture", Some("mamba")),
        "architecture \"mamba\" is not supported; known are gemma3, llama, qwen2, qwen3, qwen3moe"
    );
    assert_eq!(
        with_key("general.architecture", None::<u32>),
        "model metadata refused: key general.architecture is missing"
    );
}

#[test]
fn refusals_name_the_key() {
    let refused = |key: &str, text: String, expected: &str| {
        assert_eq!(text, format!("model metadata refused: key qwen3.{key} {expected}"));
    };
    let key = "block_count";
    refused(key, with_key("qwen3.block_count", None::<u32>), "is missing");
    refused(key, with_key("qwen3.block_count", Some(0_u32)), "is 0, outside 1 to 512");
    refused(key, with_key("qwen3.block_count", Some(513_u32)), "is 513, outside 1 to 512");
    refused(key, with_key("qwen3.block_count", Some("2")), "has type string and cannot be read as u32");

    let key = "attention.head_count_kv";
    let heads: &[u32] = &[1, 2];
    let text = with_key("qwen3.attention.head_count_kv", Some(heads));
    refused(key, text, "differs between layers (1 and 2), which is not supported");
    let text = with_key("qwen3.attention.head_count_kv", Some(&heads[..1]));
    refused(key, text, "has 1 values, but 2 are needed");
    let text = with_key("qwen3.attention.head_count_kv", Some(3_u32));
    refused(key, text, "is 3, which does not go with qwen3.attention.head_count = 4");
    let text = with_key("qwen3.attention.head_count_kv", Some(0_u32));
    refused(key, text, "is 0, outside 1 to 4");

    let text = with_key("qwen3.attention.value_length", Some(32_u32));
    refused("attention.value_length", text, "is 32, which does not go with qwen3.attention.key_length = 64");
    let text = with_key("qwen3.attention.layer_norm_rms_epsilon", Some(f32::NAN));
    refused("attention.layer_norm_rms_epsilon", text, "is NaN, outside 0 to 1");
    let text = with_key("qwen3.rope.scaling.type", Some("longrope"));
    refused("rope.scaling.type", text, "is \"longrope\"; known are none, linear, yarn");
    let text = with_key("qwen3.rope.dimension_count", Some(66_u32));
    refused("rope.dimension_count", text, "is 66, outside 2 to 64");
    let text = with_key("qwen3.rope.freq_base", Some(0.0_f32));
    assert!(text.contains("qwen3.rope.freq_base is 0, outside"), "{text}");
}

#[test]
fn refusals_name_the_tensor() {
    let result = with_tensors(|tensors| tensors.retain(|tensor| tensor.name != "blk.1.ffn_up.weight"));
    assert_eq!(
        text(result),
        "model tensors refused: tensor blk.1.ffn_up.weight is missing, expected shape [256, 256]"
    );
    let result = with_tensors(|tensors| named(tensors, "blk.0.attn_k.weight").dims = vec![256, 128]);
    assert_eq!(
        text(result),
        "model tensors refused: tensor blk.0.attn_k.weight has shape [256, 128], expected [256, 64]"
    );
    let result = with_tensors(|tensors| named(tensors, "blk.0.attn_k.weight").dims = vec![256, u64::MAX]);
    assert!(text(result).contains("blk.0.attn_k.weight has shape"));
    let result = with_tensors(|tensors| named(tensors, "blk.0.attn_q.weight").dtype = DType::IQ1_S);
    assert_eq!(
        text(result),
        "model tensors refused: tensor blk.0.attn_q.weight is IQ1_S, a type that cannot be computed with; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K can"
    );
    let result = with_tensors(|tensors| named(tensors, "output_norm.weight").dtype = DType::F16);
    assert_eq!(text(result), "model tensors refused: tensor output_norm.weight is F16, expected F32");
    let result = with_tensors(|tensors| tensors.push(tensors[0].clone()));
    assert_eq!(text(result), "model tensors refused: tensor output_norm.weight occurs twice");
}

#[test]
fn a_head_of_its_own_is_taken_and_other_tensors_are_reported() {
    let description = with_tensors(|tensors| {
        let embedding = named(tensors, "token_embd.weight").clone();
        tensors.push(TensorInfo { name: "output.weight".to_owned(), ..embedding.clone() });
        tensors.push(TensorInfo { name: "mystery.weight".to_owned(), ..embedding });
    });
    assert_eq!(description.expect("a valid model").unread_tensors, ["mystery.weight"]);
}
