//! experts*.cu against `ops::Reference`, and a row alone against the row in any batch.

use anyhow::{Result, ensure};
use bytes::Bytes;
use kernels::cuda::Cuda;
use ops::{Activation, Backend, Experts, Reference};
use quant::DType;

use crate::Gpu;
use crate::ops::{close, filled, values, weight};
use crate::random::Random;

struct Case {
    types: [DType; 3],
    n_in: usize,
    hidden: usize,
    count: usize,
    used: usize,
    stacks: [Vec<u8>; 3],
    router: Vec<f32>,
    x: Vec<f32>,
}

impl Case {
    fn new(
        random: &mut Random,
        types: [DType; 3],
        n_in: usize,
        hidden: usize,
        count: usize,
        used: usize,
        rows: usize,
    ) -> Result<Self> {
        let mut encoded = |dtype: DType, cols: usize, rows: usize| -> Result<Vec<u8>> {
            let scale = 1.0 / (cols as f32).sqrt();
            let values: Vec<f32> = random.values(cols * rows).into_iter().map(|x| x * scale).collect();
            let mut raw = vec![0; dtype.row_bytes(cols as u64)? as usize * rows];
            quant::encode(dtype, &values, &mut raw)?;
            Ok(raw)
        };
        let stacks = [
            encoded(types[0], n_in, hidden * count)?,
            encoded(types[1], n_in, hidden * count)?,
            encoded(types[2], hidden, n_in * count)?,
        ];
        let (router, x) = (random.values(rows * count), random.values(rows * n_in));
        Ok(Self { types, n_in, hidden, count, used, stacks, router, x })
    }

    fn run<B: Backend<Data: From<Bytes>>>(
        &self,
        b: &mut B,
        rows: std::ops::Range<usize>,
    ) -> Result<Vec<f32>> {
        let Self { n_in, hidden, count, .. } = *self;
        let layer = Experts {
            gate: weight(self.types[0], &[n_in, hidden, count], &self.stacks[0]),
            up: weight(self.types[1], &[n_in, hidden, count], &self.stacks[1]),
            down: weight(self.types[2], &[hidden, n_in, count], &self.stacks[2]),
            used: self.used,
        };
        let router = filled(b, rows.len(), count, &self.router[rows.start * count..rows.end * count])?;
        let x = filled(b, rows.len(), n_in, &self.x[rows.start * n_in..rows.end * n_in])?;
        let mut out = b.tensor(rows.len(), n_in)?;
        b.experts(&layer, Activation::Silu, &router, &x, &mut out, rows.len())?;
        values(b, &out, rows.len(), n_in)
    }
}

pub(crate) fn they_are_those_of_the_reference(gpu: &Gpu) -> Result<()> {
    use DType::{BF16, F16, F32, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    let mut random = Random::new(31);
    for (types, n_in, hidden, count, used, rows) in [
        ([Q8_0; 3], 64, 96, 5, 2, 7),
        ([Q4_0; 3], 96, 64, 4, 4, 3),
        ([Q4_1; 3], 256, 64, 128, 8, 40),
        ([Q5_0; 3], 64, 32, 40, 3, 33),
        ([Q5_1, Q5_1, Q8_0], 320, 32, 7, 3, 20),
        ([Q4_K, Q4_K, Q6_K], 512, 768, 16, 4, 40),
        ([Q5_K, Q4_K, Q5_K], 256, 256, 9, 1, 12),
        ([Q2_K, Q2_K, Q3_K], 1024, 256, 64, 8, 70),
        ([Q3_K, Q3_K, Q2_K], 256, 256, 3, 2, 600),
        ([F32; 3], 48, 40, 6, 2, 9),
        ([F16, F16, BF16], 64, 24, 6, 2, 9),
    ] {
        let rows = if gpu.small { rows.min(6) } else { rows };
        let case = Case::new(&mut random, types, n_in, hidden, count, used, rows)?;
        let what = format!("{types:?}, {count} of {n_in} x {hidden}, {used} used, {rows} rows");
        let mut cuda = Cuda::new(&gpu.device)?;
        let found = case.run(&mut cuda, 0..rows)?;
        // The gate's rounding may move an activation to another int8.
        close(&what, &found, &case.run(&mut Reference::new(), 0..rows)?, 2e-2)?;
        for part in [0..1, rows - 1..rows, rows / 3..rows, 0..rows / 2 + 1] {
            let alone = case.run(&mut cuda, part.clone())?;
            ensure!(
                alone == found[part.start * n_in..part.end * n_in],
                "{what}: rows {part:?} have other bits"
            );
        }
    }
    Ok(())
}
