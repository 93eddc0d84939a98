// SPDX-License-Identifier: Apache-2.0

//! F32, F16 and BF16: little-endian values without blocks.

use half::{bf16, f16};

/// An element type without blocks.
pub(crate) trait Plain {
    const BYTES: usize;

    fn read(bytes: &[u8]) -> f32;

    /// Rounds to nearest even.
    fn write(x: f32, bytes: &mut [u8]);
}

macro_rules! plain {
    ($type:ty, $to_f32:expr, $from_f32:expr) => {
        impl Plain for $type {
            const BYTES: usize = size_of::<$type>();

            fn read(bytes: &[u8]) -> f32 {
                let mut value = [0; size_of::<$type>()];
                value.copy_from_slice(bytes);
                $to_f32(<$type>::from_le_bytes(value))
            }

            fn write(x: f32, bytes: &mut [u8]) {
                bytes.copy_from_slice(&<$type>::to_le_bytes($from_f32(x)));
            }
        }
    };
}

plain!(f32, |x| x, |x| x);
plain!(f16, f16::to_f32, f16::from_f32);
plain!(bf16, bf16::to_f32, bf16::from_f32);

pub(crate) fn decode<T: Plain>(bytes: &[u8], out: &mut [f32]) {
    for (bytes, y) in bytes.chunks_exact(T::BYTES).zip(out) {
        *y = T::read(bytes);
    }
}

pub(crate) fn encode<T: Plain>(x: &[f32], bytes: &mut [u8]) {
    for (&x, bytes) in x.iter().zip(bytes.chunks_exact_mut(T::BYTES)) {
        T::write(x, bytes);
    }
}
