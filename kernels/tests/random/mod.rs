//! Random numbers for tests, from a seed, and weights made of them.

use bytes::Bytes;
use quant::DType;

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// -1 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    }

    pub(crate) fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }
}

/// Types that can be computed with.
pub(crate) const DTYPES: [DType; 13] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// Where the f16 scales of a block are.
fn scale_offsets(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => &[],
    }
}

/// Rows of values that were encoded, at an odd address.
pub(crate) fn encoded(random: &mut Random, dtype: DType, cols: usize, rows: usize) -> Bytes {
    let values = random.values(cols * rows);
    let mut bytes = vec![0; 1 + dtype.row_bytes((cols * rows) as u64).unwrap() as usize];
    quant::encode(dtype, &values, &mut bytes[1..]).unwrap();
    Bytes::from(bytes).slice(1..)
}

/// Rows of any bits a quantised block may have, with scales among zero, subnormal, ordinary, negative and the largest.
pub(crate) fn arbitrary(random: &mut Random, dtype: DType, cols: usize, rows: usize) -> Bytes {
    let len = dtype.row_bytes((cols * rows) as u64).unwrap() as usize;
    let mut bytes: Vec<u8> = (0..len + 8).map(|_| random.next() as u8).collect();
    for block in bytes[3..3 + len].chunks_exact_mut(dtype.block_bytes()) {
        for &offset in scale_offsets(dtype) {
            let scale = match random.next() % 8 {
                0 => 0x0000_u16,
                1 => 0x0001,
                2 => 0x83ff,
                3 => 0x7bff,
                4 => 0xfbff,
                _ => 0x2000 | (random.next() as u16 & 0x9fff),
            };
            block[offset..offset + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    Bytes::from(bytes).slice(3..3 + len)
}
