// SPDX-License-Identifier: Apache-2.0

//! Tests each op of `Reference` against numbers computed by hand, and the errors for invalid
//! arguments.

#![expect(clippy::unwrap_used, reason = "helpers of tests, where a panic is the report")]

use bytes::Bytes;
use ops::{
    Activation, AttentionSpan, AttentionSpec, Backend, Experts, HostTensor, KvLayer, KvLayout, KvType,
    Linear, OpError, Reference, RopePairing, RopeSpec, Step, Weight,
};
use quant::DType;

fn f32_weight(dims: &[usize], values: &[f32]) -> Weight<Reference> {
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Weight { dtype: DType::F32, dims: dims.to_vec(), layout: 0, data: Bytes::from(data) }
}

fn tensor(backend: &mut Reference, cols: usize, values: &[f32]) -> HostTensor {
    let rows = values.len() / cols;
    let mut tensor = backend.tensor(rows, cols).unwrap();
    backend.write(&mut tensor, rows, values).unwrap();
    tensor
}

fn values(backend: &mut Reference, tensor: &HostTensor, rows: usize, cols: usize) -> Vec<f32> {
    let mut host = vec![0.0; rows * cols];
    backend.read(tensor, rows, &mut host).unwrap();
    host
}

/// Begins a step with rows of one sequence. `table` is its block table, with four tokens a block.
fn begin(backend: &mut Reference, positions: &[u32], table: &[u32]) {
    let slots: Vec<u32> = positions.iter().map(|&p| table[p as usize / 4] * 4 + p % 4).collect();
    let zeros = vec![0; positions.len()];
    backend
        .begin(&Step {
            tokens: &zeros,
            positions,
            sequences: &zeros,
            kv_slots: &slots,
            tables: &[table],
            outputs: &[positions.len() as u32 - 1],
        })
        .unwrap();
}

fn layout(kind: KvType) -> KvLayout {
    let layer = KvLayer { kv_heads: 1, head_dim: 2, kind, span: AttentionSpan::Full };
    KvLayout { block_tokens: 4, blocks: 3, layers: vec![layer] }
}

#[test]
fn rms_norm_divides_by_the_root_of_the_mean_square() {
    let mut backend = Reference::new();
    let x = tensor(&mut backend, 2, &[3.0, 4.0, 0.0, 0.0]);
    let mut out = backend.tensor(2, 2).unwrap();
    backend.rms_norm(&x, &f32_weight(&[2], &[1.0, 2.0]), 0.0, &mut out, 1).unwrap();
    let root = 12.5_f32.sqrt();
    assert_eq!(values(&mut backend, &out, 1, 2), [3.0 / root, 8.0 / root]);
    backend.rms_norm(&x, &f32_weight(&[2], &[1.0, 2.0]), 1e-6, &mut out, 2).unwrap();
    assert_eq!(values(&mut backend, &out, 2, 2)[2..], [0.0, 0.0]);
}

#[test]
fn heads_are_normed_one_by_one() {
    let mut backend = Reference::new();
    let mut x = tensor(&mut backend, 4, &[3.0, 4.0, 30.0, 40.0]);
    backend.rms_norm_heads(&mut x, &f32_weight(&[2], &[1.0, 1.0]), 0.0, 1).unwrap();
    let host = values(&mut backend, &x, 1, 4);
    assert_eq!(host[..2], host[2..]);
}

#[test]
fn add_rms_norm_updates_the_residual_stream_too() {
    let mut backend = Reference::new();
    let mut x = tensor(&mut backend, 2, &[1.0, 1.0]);
    let y = tensor(&mut backend, 2, &[2.0, 3.0]);
    let mut out = backend.tensor(1, 2).unwrap();
    backend.add_rms_norm(&mut x, &y, &f32_weight(&[2], &[1.0, 1.0]), 0.0, &mut out, 1).unwrap();
    assert_eq!(values(&mut backend, &x, 1, 2), [3.0, 4.0]);
    assert_eq!(values(&mut backend, &out, 1, 2)[0], 3.0 / 12.5_f32.sqrt());
}

#[test]
fn gates_are_the_textbook_ones() {
    let gated = |activation, gate: &[f32]| {
        let mut backend = Reference::new();
        let (mut x, up) =
            (tensor(&mut backend, gate.len(), gate), tensor(&mut backend, gate.len(), &[2.0; 4]));
        backend.gated(activation, &mut x, &up, 1).unwrap();
        values(&mut backend, &x, 1, gate.len())
    };
    let x = [-3.0, -0.25, 0.0, 1.5];
    let tanh =
        |x: f64| x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
    for (found, x) in gated(Activation::GeluTanh, &x).into_iter().zip(x) {
        assert!((f64::from(found) - tanh(x.into())).abs() < 1e-6, "{x}: {found}");
    }
    let sigmoid = |x: f64| 2.0 * x / (1.0 + (-x).exp());
    for (found, x) in gated(Activation::Silu, &x).into_iter().zip(x) {
        assert!((f64::from(found) - sigmoid(x.into())).abs() < 1e-6, "{x}: {found}");
    }
}

#[test]
fn scaling_multiplies_the_rows_of_the_step_only() {
    let mut backend = Reference::new();
    let mut x = tensor(&mut backend, 2, &[1.0, -2.0, 3.0, 4.0]);
    backend.scale(&mut x, 1.5, 1, 2).unwrap();
    assert_eq!(values(&mut backend, &x, 2, 2), [1.5, -3.0, 3.0, 4.0]);
}

#[test]
fn linear_multiplies_rows_and_adds_the_bias() {
    let mut backend = Reference::new();
    let x = tensor(&mut backend, 2, &[1.0, 2.0, 3.0, 4.0]);
    let mut out = backend.tensor(2, 3).unwrap();
    let weight = f32_weight(&[2, 3], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    let layer = Linear { weight, bias: Some(f32_weight(&[3], &[0.0, 0.0, 10.0])) };
    backend.linear(&layer, &x, &mut out, 2).unwrap();
    assert_eq!(values(&mut backend, &out, 2, 3), [1.0, 2.0, 13.0, 3.0, 4.0, 17.0]);
}

#[test]
fn only_the_default_rounds_activations_and_only_for_quantized_weights() {
    let x: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin()).collect();
    let mut bytes = vec![0; 34];
    quant::encode(DType::Q8_0, &x, &mut bytes).unwrap();
    let mut decoded = vec![0.0; 32];
    quant::decode(DType::Q8_0, &bytes, &mut decoded).unwrap();
    let weight = Weight { dtype: DType::Q8_0, dims: vec![32], layout: 0, data: Bytes::from(bytes) };
    let layer = Linear { weight, bias: None };
    let product = |backend: &mut Reference| {
        let x = tensor(backend, 32, &x);
        let mut out = backend.tensor(1, 1).unwrap();
        backend.linear(&layer, &x, &mut out, 1).unwrap();
        values(backend, &out, 1, 1)[0]
    };
    let exact: f64 = x.iter().zip(&decoded).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    assert_eq!(product(&mut Reference::dequantized()), exact as f32);
    let rounded: f64 = decoded.iter().map(|&a| f64::from(a) * f64::from(a)).sum();
    assert!((f64::from(product(&mut Reference::new())) - rounded).abs() < 1e-5);
}

#[test]
fn rope_turns_adjacent_or_half_distant_pairs_and_leaves_the_rest() {
    let quarter = std::f32::consts::FRAC_PI_2;
    for (pairing, expected) in [
        (RopePairing::Adjacent, [-2.0, 1.0, 3.0, 4.0, 5.0, 6.0]),
        (RopePairing::Halves, [-3.0, 2.0, 1.0, 4.0, 5.0, 6.0]),
    ] {
        let mut backend = Reference::new();
        let spec = RopeSpec { pairing, inverse_frequencies: vec![quarter, 0.0], magnitude: 1.0 };
        let rope = backend.rope_table(&spec).unwrap();
        let mut x = tensor(&mut backend, 6, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        begin(&mut backend, &[1], &[0]);
        backend.rope(&mut x, &rope, 6, 1).unwrap();
        for (found, expected) in values(&mut backend, &x, 1, 6).iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{pairing:?}: {found} is not {expected}");
        }
    }
}

#[test]
fn rope_multiplies_by_its_magnitude() {
    let mut backend = Reference::new();
    let pairing = RopePairing::Adjacent;
    let rope = RopeSpec { pairing, inverse_frequencies: vec![0.0], magnitude: 1.5 };
    let mut x = tensor(&mut backend, 2, &[2.0, 4.0]);
    begin(&mut backend, &[7], &[0, 1]);
    backend.rope(&mut x, &rope, 2, 1).unwrap();
    assert_eq!(values(&mut backend, &x, 1, 2), [3.0, 6.0]);
}

#[test]
fn attention_sees_the_keys_up_to_its_own_position_through_the_block_table() {
    let mut backend = Reference::new();
    let mut kv = backend.kv(&layout(KvType::F32)).unwrap();
    let positions: Vec<u32> = (0..6).collect();
    // Key p is (p, 0), and value p is (p, 1). With a large scale, attention selects the last key
    // that the row attends to.
    let keys: Vec<f32> = positions.iter().flat_map(|&p| [p as f32, 0.0]).collect();
    let ends: Vec<f32> = positions.iter().flat_map(|&p| [p as f32, 1.0]).collect();
    begin(&mut backend, &positions, &[2, 0]);
    let keys = tensor(&mut backend, 2, &keys);
    let ends = tensor(&mut backend, 2, &ends);
    backend.kv_write(&mut kv, 0, &keys, &ends, 6).unwrap();
    let queries = tensor(&mut backend, 4, &[[1.0, 0.0, 0.0, 0.0]; 6].concat());
    let mut out = backend.tensor(6, 4).unwrap();
    let spec = AttentionSpec { heads: 2, kv_heads: 1, head_dim: 2, scale: 100.0 };
    backend.attention(&kv, 0, &queries, &spec, &mut out, 6).unwrap();
    for (p, row) in values(&mut backend, &out, 6, 4).chunks(4).enumerate() {
        // Both query heads read KV head 0. The query of the second head is zero, so its result is
        // the mean.
        assert_eq!(row, [p as f32, 1.0, p as f32 / 2.0, 1.0], "position {p}");
    }
}

#[test]
fn keys_are_rounded_to_the_type_of_the_cache() {
    // q8_0 stores 127 quants of a scale that is rounded to 129 * 2^-14.
    let of_q8_0 = 127.0 * 129.0 / 16384.0;
    for (kind, expected) in
        [(KvType::F32, 1.0001), (KvType::F16, 1.0), (KvType::Bf16, 1.0), (KvType::Q8_0, of_q8_0)]
    {
        let mut backend = Reference::new();
        let mut kv = backend.kv(&layout(kind)).unwrap();
        begin(&mut backend, &[0], &[1]);
        let x = tensor(&mut backend, 2, &[1.0001, 1.0001]);
        backend.kv_write(&mut kv, 0, &x, &x, 1).unwrap();
        let mut out = backend.tensor(1, 2).unwrap();
        let spec = AttentionSpec { heads: 1, kv_heads: 1, head_dim: 2, scale: 1.0 };
        backend.attention(&kv, 0, &x, &spec, &mut out, 1).unwrap();
        assert_eq!(values(&mut backend, &out, 1, 2), [expected, expected]);
    }
}

#[test]
fn a_row_goes_through_its_best_experts_only() {
    let mut backend = Reference::new();
    // Expert e computes silu(x) * x * 10^e, with a hidden width of one.
    let ones = f32_weight(&[1, 1, 3], &[1.0; 3]);
    let down = f32_weight(&[1, 1, 3], &[1.0, 10.0, 100.0]);
    let layer = Experts { gate: ones.clone(), up: ones, down, used: 2 };
    let x = tensor(&mut backend, 1, &[2.0, 2.0]);
    let router = tensor(&mut backend, 3, &[1.0, 1.0, -90.0, -90.0, 3.0, 3.0]);
    let mut out = backend.tensor(2, 1).unwrap();
    backend.experts(&layer, Activation::Silu, &router, &x, &mut out, 2).unwrap();
    let one = 4.0 / (1.0 + (-2.0_f32).exp());
    let host = values(&mut backend, &out, 2, 1);
    assert!((host[0] / one - 5.5).abs() < 1e-5, "{host:?}");
    assert!((host[1] / one - 55.0).abs() < 1e-5, "{host:?}");
}

#[test]
fn refusals_name_op_and_operand() {
    let mut backend = Reference::new();
    let x = tensor(&mut backend, 2, &[1.0, 2.0]);
    let mut out = backend.tensor(1, 2).unwrap();
    let text = |result: Result<(), OpError>| result.unwrap_err().to_string();
    let norm = f32_weight(&[3], &[1.0; 3]);
    assert_eq!(
        text(backend.rms_norm(&x, &norm, 0.0, &mut out, 1)),
        "rms_norm: columns of x is 2, expected 3"
    );
    let norm = f32_weight(&[2], &[1.0; 2]);
    assert_eq!(
        text(backend.rms_norm(&x, &norm, 0.0, &mut out, 2)),
        "rms_norm: row 1 is out of range: there are 1"
    );
    let short = Weight { data: Bytes::from_static(&[0; 7]), ..norm.clone() };
    assert_eq!(
        text(backend.rms_norm(&x, &short, 0.0, &mut out, 1)),
        "rms_norm: bytes of the weight is 7, expected 8"
    );
    let tiled = Weight { layout: 9, ..norm.clone() };
    assert_eq!(
        text(backend.rms_norm(&x, &tiled, 0.0, &mut out, 1)),
        "rms_norm: no kernel for weight layout 9"
    );
    let unknown = Weight { dtype: DType::I8, data: Bytes::from_static(&[0; 2]), ..norm.clone() };
    assert_eq!(
        text(backend.rms_norm(&x, &unknown, 0.0, &mut out, 1)),
        "rms_norm: no kernel for tensor type I8"
    );

    begin(&mut backend, &[0], &[0]);
    assert_eq!(
        text(backend.embed(&f32_weight(&[3], &[1.0; 3]), &mut out, 1)),
        "embed: columns of out is 2, expected 3"
    );
    let empty = Weight { dims: vec![2, 0], data: Bytes::new(), ..norm };
    assert_eq!(text(backend.embed(&empty, &mut out, 1)), "embed: token 0 is out of range: there are 0");

    let mut kv = backend.kv(&layout(KvType::F16)).unwrap();
    let spec = AttentionSpec { heads: 1, kv_heads: 1, head_dim: 2, scale: 1.0 };
    assert_eq!(
        text(backend.attention(&kv, 0, &x, &spec, &mut out, 1)),
        "attention: block 0 of the KV cache is read before it is written"
    );
    begin(&mut backend, &[0], &[3]);
    assert_eq!(
        text(backend.kv_write(&mut kv, 0, &x, &x, 1)),
        "kv_write: block 3 is out of range: there are 3"
    );
    assert_eq!(
        text(backend.kv_write(&mut kv, 1, &x, &x, 1)),
        "kv_write: layer 1 is out of range: there are 1"
    );
}

#[test]
fn a_step_must_be_whole() {
    let mut backend = Reference::new();
    let step = Step {
        tokens: &[1, 2],
        positions: &[0, 1],
        sequences: &[0, 0],
        kv_slots: &[0, 1],
        tables: &[&[0]],
        outputs: &[1],
    };
    assert!(backend.begin(&step).is_ok());
    for (broken, text) in [
        (Step { positions: &[0], ..step }, "begin: number of positions is 1, expected 2"),
        (Step { sequences: &[0, 1], ..step }, "begin: sequence 1 is out of range: there are 1"),
        (Step { outputs: &[2], ..step }, "begin: output row 2 is out of range: there are 2"),
    ] {
        assert_eq!(backend.begin(&broken).unwrap_err().to_string(), text);
    }
}
