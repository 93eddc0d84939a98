// SPDX-License-Identifier: Apache-2.0

//! Tests that `encode` keeps the error within the limit of each format, and accepts all inputs.

use proptest::prelude::*;
use quant::{DType, decode, encode};

/// By format, the largest relative error (rms) for values of a normal distribution. It is ggml's
/// own error, rounded up.
const NORMAL_ERROR: [(DType, f64); 13] = [
    (DType::F32, 0.0),
    (DType::F16, 0.00021),
    (DType::BF16, 0.0017),
    (DType::Q8_0, 0.0055),
    (DType::Q6_K, 0.0181),
    (DType::Q5_1, 0.0373),
    (DType::Q5_0, 0.0441),
    (DType::Q5_K, 0.0368),
    (DType::Q4_1, 0.0776),
    (DType::Q4_0, 0.0842),
    (DType::Q4_K, 0.0720),
    (DType::Q3_K, 0.1512),
    (DType::Q2_K, 0.2951),
];

fn round_trip(dtype: DType, x: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0; dtype.row_bytes(x.len() as u64).unwrap() as usize];
    encode(dtype, x, &mut bytes).unwrap();
    let mut y = vec![0.0; x.len()];
    decode(dtype, &bytes, &mut y).unwrap();
    y
}

/// Values close to a normal distribution with deviation 0.05: sums of 12 uniform pseudo-random
/// numbers of a fixed sequence.
fn normal(count: usize) -> Vec<f32> {
    let mut state = 1_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| 0.05 * (0..12).map(|_| uniform()).sum::<f32>()).collect()
}

#[test]
fn normal_values_lose_no_more_than_the_format_must() {
    let x = normal(16 * 4096);
    let energy: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
    for (dtype, limit) in NORMAL_ERROR {
        let y = round_trip(dtype, &x);
        let error: f64 = x.iter().zip(&y).map(|(x, y)| f64::from(x - y).powi(2)).sum();
        let relative = (error / energy).sqrt();
        println!("{dtype}: {relative:.4}");
        assert!(relative <= limit, "{dtype}: {relative} is above {limit}");
    }
}

#[test]
fn zeros_stay_zeros_and_constants_stay_close() {
    for (dtype, _) in NORMAL_ERROR {
        assert_eq!(round_trip(dtype, &[0.0; 256]), [0.0; 256], "{dtype}");
        for constant in [1.0_f32, -1.0, 1000.0, -3e-3] {
            for y in round_trip(dtype, &[constant; 256]) {
                let error = (y - constant).abs();
                assert!(error <= 0.01 * constant.abs(), "{dtype}: {y} is not {constant}");
            }
        }
    }
}

proptest! {
    /// For any values, the largest error of a block is at most a few quantization steps of the
    /// block's range.
    #[test]
    fn no_value_is_further_off_than_its_blocks_range_allows(
        x in prop::collection::vec(-60_000.0_f32..60_000.0, 256),
        exponent in -5_i32..1,
    ) {
        let x: Vec<f32> = x.iter().map(|x| x * 10_f32.powi(exponent)).collect();
        let range = x.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        for (dtype, _) in NORMAL_ERROR {
            // BF16 has a precision of 8 of its 16 bits.
            let bits = if dtype == DType::BF16 { 8 } else { dtype.bits_per_value().floor() as i32 };
            // If all values of a Q6_K block are below 2^-25 * 128 * 32, f16 rounds its scale to 0.
            // The constant allows for that.
            let allowed = 3.0 * range * 0.5_f32.powi(bits.min(11)) + 2e-4;
            for (x, y) in x.iter().zip(round_trip(dtype, &x)) {
                prop_assert!((x - y).abs() <= allowed, "{}: {} is not {} within {}", dtype, y, x, allowed);
            }
        }
    }

    #[test]
    fn any_bits_encode_to_something(bits in prop::collection::vec(any::<u32>(), 256)) {
        let x: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        for (dtype, _) in NORMAL_ERROR {
            round_trip(dtype, &x);
        }
        let _ = quant::quantize_row_q8_0(&x);
        let _ = quant::quantize_row_q8_1(&x);
        let _ = quant::quantize_row_q8_k(&x);
    }
}
