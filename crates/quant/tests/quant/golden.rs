// SPDX-License-Identifier: Apache-2.0

//! Compares formats with ggml's own results: blocks, decoded values, activations and dot products.
//!
//! The environment variable `BALLAST_TEST_DATA` names the folder with `data/quants` and
//! `data/ggml-blocks`. Their READMEs say how they were made. Without it, the tests use the sample
//! of ggml's vectors in `tests/data`.

use quant::{Activations, BlockQ8_0, BlockQ8_1, BlockQ8_K, DType, decode, dot};
use serde_json::Value;
use std::path::PathBuf;

/// Every type that `decode` and `dot` support.
const COMPUTED: [DType; 13] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// Relative to the sum of magnitudes of a dot product's terms; from the README of `data/quants`.
const DOT_TOLERANCE: f64 = 1e-5;
/// For Q8_1, whose sum ggml stores as f16. The f64 reference does not round it.
const DOT_TOLERANCE_Q8_1: f64 = 1e-3;

#[test]
fn decode_equals_ggml_bit_for_bit() {
    let Some(quants) = data("quants") else { return };
    for dtype in COMPUTED.into_iter().filter(|&dtype| dtype != DType::F32) {
        let blocks = std::fs::read(quants.join(format!("{dtype}.blocks"))).unwrap();
        let expected = floats(&std::fs::read(quants.join(format!("{dtype}.f32"))).unwrap());
        check_decode(dtype, &blocks, &expected);
    }
}

#[test]
fn vectors_of_every_type_decode_and_multiply_as_in_ggml() {
    let path = match data("ggml-blocks") {
        Some(folder) => folder.join("quant_vectors.bin"),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/quant_vectors.bin"),
    };
    let bytes = std::fs::read(path).unwrap();
    let mut reader = GoldenReader { bytes: &bytes };
    assert_eq!(reader.take(4), b"GQV1");
    let (types, n) = (reader.i32(), reader.i32() as usize);
    let row = floats(reader.take(4 * n));
    let mut computed = 0;
    for _ in 0..types {
        let dtype = DType::from_id(reader.i32() as u32).unwrap();
        assert_eq!(reader.i32() as usize, dtype.block_len(), "{dtype}");
        assert_eq!(reader.i32() as usize, dtype.block_bytes(), "{dtype}");
        let weight_bytes = reader.i32() as usize;
        let (activation_type, activation_bytes) = (reader.i32(), reader.i32() as usize);
        assert_eq!(dtype.row_bytes(n as u64), Ok(weight_bytes as u64), "{dtype}");
        let blocks = reader.take(weight_bytes);
        let expected = floats(reader.take(4 * n));
        let activation = reader.take(activation_bytes);
        let product = reader.f32();
        if !COMPUTED.contains(&dtype) {
            continue;
        }
        computed += 1;
        check_decode(dtype, blocks, &expected);
        assert_eq!(dtype.activation().map(|a| a.id() as i32), Some(activation_type), "{dtype}");
        let activation = stored_activations(dtype, activation);
        let scale: f64 = expected.iter().zip(&row).map(|(w, a)| f64::from(w * a).abs()).sum();
        check_dot(dtype, blocks, &activation, f64::from(product), scale, DOT_TOLERANCE);
    }
    assert!(computed >= 12, "only {computed} types in the vectors");
}

#[test]
fn dot_products_equal_ggml_within_the_stated_tolerance() {
    let Some(quants) = data("quants") else { return };
    for dtype in COMPUTED.into_iter().filter(|&dtype| dtype != DType::F32) {
        let blocks = std::fs::read(quants.join(format!("{dtype}.blocks"))).unwrap();
        let facts: Value =
            serde_json::from_slice(&std::fs::read(quants.join(format!("{dtype}.json"))).unwrap()).unwrap();
        let row_bytes = facts["row_bytes"].as_u64().unwrap() as usize;
        let format = dtype.activation().unwrap();
        let stored = std::fs::read(quants.join(format!("act.{format}.blocks"))).unwrap();
        let first_row = &stored[..format.row_bytes(256).unwrap() as usize];
        let tolerance = if format == DType::Q8_1 { DOT_TOLERANCE_Q8_1 } else { DOT_TOLERANCE };
        let activation = stored_activations(dtype, first_row);
        for (row, weights) in blocks.chunks_exact(row_bytes).enumerate() {
            let scale = facts["sum_abs"][row].as_f64();
            let (Some(product), Some(scale)) = (facts["dot_f64"][row].as_f64(), scale) else { continue };
            check_dot(dtype, weights, &activation, product, scale, tolerance);
            if format == DType::Q8_1 {
                // ggml's own result uses the same stored sum. Therefore the tolerance of the other
                // types applies to it.
                let product = facts["vec_dot"][row].as_f64().unwrap();
                check_dot(dtype, weights, &activation, product, scale, DOT_TOLERANCE);
            }
        }
        let long = &facts["row4096"];
        let (product, scale) = (long["dot_f64"].as_f64().unwrap(), long["sum_abs"].as_f64().unwrap());
        check_dot(
            dtype,
            &blocks[..16 * row_bytes],
            &stored_activations(dtype, &stored),
            product,
            scale,
            tolerance,
        );
    }
}

#[test]
fn activations_follow_the_scalar_rules() {
    let Some(quants) = data("quants") else { return };
    let x = floats(&std::fs::read(quants.join("act.f32")).unwrap());
    let stored = |format| std::fs::read(quants.join(format!("act.{format}.blocks"))).unwrap();

    // Q8_K, F16 and BF16 have the same rule on all machines, so all bits are equal.
    let expected: Vec<BlockQ8_K> = pods(&stored("Q8_K"));
    assert_eq!(quant::quantize_row_q8_k(&x).unwrap(), expected);
    for (format, weight) in [("F16", DType::F16), ("BF16", DType::BF16)] {
        let converted = Activations::for_weight(weight, &x).unwrap();
        assert_eq!(converted, Some(stored_activations(weight, &stored(format))), "{format}");
    }

    // For Q8_0 and Q8_1, ggml's SIMD code differs from its scalar code only at halves. This row has
    // none.
    let expected: Vec<BlockQ8_0> = pods(&stored("Q8_0"));
    assert_eq!(quant::quantize_row_q8_0(&x).unwrap(), expected);
    let expected: Vec<BlockQ8_1> = pods(&stored("Q8_1"));
    assert_eq!(quant::quantize_row_q8_1(&x).unwrap(), expected);
}

#[test]
fn q8_0_rounds_halves_away_from_zero_and_q8_k_to_even() {
    let mut x = [0.0; 256];
    x[..6].copy_from_slice(&[127.0, 0.5, 1.5, -0.5, -1.5, 2.5]);
    let q8_0 = quant::quantize_row_q8_0(&x[..32]).unwrap();
    assert_eq!(q8_0[0].qs[..6], [127, 1, 2, -1, -2, 3]);
    let q8_k = quant::quantize_row_q8_k(&x).unwrap();
    assert_eq!((q8_k[0].d, &q8_k[0].qs[..6]), (-1.0, &[-127, 0, -2, 0, 2, -2][..]));
    assert_eq!(q8_k[0].bsums[0], -129);
    let zero = quant::quantize_row_q8_k(&[0.0; 256]).unwrap();
    assert_eq!((zero[0].d, zero[0].qs, zero[0].bsums), (0.0, [0; 256], [0; 16]));
}

fn check_decode(dtype: DType, blocks: &[u8], expected: &[f32]) {
    let mut out = vec![0.0; expected.len()];
    // Shifts the blocks by one byte, since blocks may start at any address.
    let shifted = [&[0], blocks].concat();
    decode(dtype, &shifted[1..], &mut out).unwrap();
    for (e, (found, expected)) in out.iter().zip(expected).enumerate() {
        assert_eq!(found.to_bits(), expected.to_bits(), "{dtype}, value {e}: {found} is not {expected}");
    }
}

fn check_dot(
    dtype: DType,
    weights: &[u8],
    activation: &Activations,
    expected: f64,
    scale: f64,
    tolerance: f64,
) {
    let found = f64::from(dot(dtype, weights, activation).unwrap());
    if expected.abs() > f64::from(f32::MAX) {
        assert!(found.is_infinite(), "{dtype}: {found} where f32 overflows");
        return;
    }
    let error = (found - expected).abs();
    assert!(error <= tolerance * scale, "{dtype}: {found} is not {expected}, off by {error} of {scale}");
}

/// ggml's activation bytes, in the activation format of `dtype` weights.
fn stored_activations(dtype: DType, bytes: &[u8]) -> Activations {
    match dtype.activation().unwrap() {
        DType::F32 => Activations::F32(pods(bytes)),
        DType::F16 => Activations::F16(pods(bytes)),
        DType::BF16 => Activations::BF16(pods(bytes)),
        DType::Q8_0 => Activations::Q8_0(pods(bytes)),
        DType::Q8_1 => Activations::Q8_1(pods(bytes)),
        DType::Q8_K => Activations::Q8_K(pods(bytes)),
        other => panic!("{other} is no activation format"),
    }
}

fn pods<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    pods(bytes)
}

fn data(folder: &str) -> Option<PathBuf> {
    let found =
        std::env::var_os("BALLAST_TEST_DATA").map(|root| PathBuf::from(root).join("data").join(folder));
    if found.is_none() {
        eprintln!("SKIPPED data/{folder}: set BALLAST_TEST_DATA to the folder that has it");
    }
    found
}

struct GoldenReader<'a> {
    bytes: &'a [u8],
}

impl<'a> GoldenReader<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.bytes.split_at(len);
        self.bytes = rest;
        taken
    }

    fn i32(&mut self) -> i32 {
        i32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn f32(&mut self) -> f32 {
        f32::from_le_bytes(self.take(4).try_into().unwrap())
    }
}
