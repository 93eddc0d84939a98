// SPDX-License-Identifier: Apache-2.0

//! Sequences of a model with attention windows in some layers, computed by any backend: in steps of
//! their own or together, with blocks that are freed, used again and shared.

use ops::{AttentionSpan, AttentionSpec, Backend, KvLayer, KvLayout, KvType, OpError, Step};

use crate::split_mix::SplitMix64;

/// Which layers have a window: four of six.
const WINDOWED: [bool; 6] = [true, true, false, true, true, false];

pub(crate) struct WindowCase {
    pub(crate) spec: AttentionSpec,
    pub(crate) kind: KvType,
    pub(crate) block_tokens: usize,
    pub(crate) window: usize,
    /// Keys, values and queries of all tokens, by sequence. The second sequence begins with tokens
    /// of the first one.
    rows: Vec<[Vec<f32>; 3]>,
    pub(crate) shared: usize,
}

/// A sequence, and its number of rows in a step.
pub(crate) type RowChunk = (usize, usize);

/// A way to compute the same tokens.
pub(crate) struct WindowSchedule<'a> {
    pub(crate) steps: &'a [Vec<RowChunk>],
    /// Whether blocks before the window are freed.
    pub(crate) frees: bool,
    /// Whether the second sequence shares the first blocks of the first.
    pub(crate) shares: bool,
}

/// Reference counts of blocks, and the block tables of all sequences: `[sequence][group]`.
struct Tables {
    holders: Vec<u32>,
    free: Vec<u32>,
    tables: Vec<Vec<Vec<u32>>>,
}

impl Tables {
    fn take(&mut self) -> u32 {
        let block = self.free.pop().unwrap();
        self.holders[block as usize] = 1;
        block
    }

    fn leave(&mut self, sequence: usize, group: usize, first: usize) {
        for entry in 0..first {
            let block = std::mem::take(&mut self.tables[sequence][group][entry]);
            if block != 0 {
                self.holders[block as usize] -= 1;
                if self.holders[block as usize] == 0 {
                    // The next allocation reuses the block.
                    self.free.push(block);
                }
            }
        }
    }
}

fn below(random: &mut SplitMix64, end: usize) -> usize {
    (random.next() % end as u64) as usize
}

fn filled<B: Backend>(b: &mut B, rows: usize, cols: usize, host: &[f32]) -> B::Tensor {
    let mut tensor = b.tensor(rows, cols).unwrap();
    b.write(&mut tensor, rows, host).unwrap();
    tensor
}

impl WindowCase {
    /// Heads of one of the sizes `head_dims`.
    pub(crate) fn new(
        random: &mut SplitMix64,
        head_dims: &[usize],
        kind: KvType,
        block_tokens: usize,
        window: usize,
        shared: usize,
    ) -> Self {
        let (kv_heads, group) = (1 + below(random, 2), 1 + below(random, 3));
        let head_dim = head_dims[below(random, head_dims.len())];
        let spec = AttentionSpec { heads: kv_heads * group, kv_heads, head_dim, scale: 0.4 };
        let lens = [shared + 1 + below(random, 400), shared + 1 + below(random, 90), 1 + below(random, 300)];
        let (kv_width, width) = (kv_heads * head_dim, spec.heads * head_dim);
        let mut rows = lens.map(|len| [kv_width, kv_width, width].map(|width| random.values(len * width)));
        let [first, second, _] = &mut rows;
        for (of_second, of_first) in second.iter_mut().zip(first).take(2) {
            of_second[..shared * kv_width].copy_from_slice(&of_first[..shared * kv_width]);
        }
        Self { spec, kind, block_tokens, window, rows: rows.into(), shared }
    }

    fn len(&self, sequence: usize) -> usize {
        self.rows[sequence][0].len() / (self.spec.kv_heads * self.spec.head_dim)
    }

    fn layout(&self) -> KvLayout {
        let AttentionSpec { kv_heads, head_dim, .. } = self.spec;
        let layer = |windowed| {
            let span =
                if windowed { AttentionSpan::Window { tokens: self.window } } else { AttentionSpan::Full };
            KvLayer { kv_heads, head_dim, kind: self.kind, span }
        };
        let layers: Vec<KvLayer> = WINDOWED.map(layer).into();
        let mut layout = KvLayout { block_tokens: self.block_tokens, blocks: 0, layers };
        let entries = (0..3).map(|sequence| self.len(sequence).div_ceil(self.block_tokens)).sum::<usize>();
        layout.blocks = entries * layout.groups().len() + 1;
        layout
    }

    /// Computes each sequence in one step of its own. No block is shared or freed.
    pub(crate) fn alone(&self) -> Vec<Vec<RowChunk>> {
        (0..3).map(|sequence| vec![(sequence, self.len(sequence))]).collect()
    }

    /// Chunks of random sizes. The second sequence begins after the first has computed the shared
    /// tokens.
    pub(crate) fn together(&self, random: &mut SplitMix64) -> Vec<Vec<RowChunk>> {
        let (mut done, mut steps) = ([0, self.shared, 0], Vec::new());
        while (0..3).any(|sequence| done[sequence] < self.len(sequence)) {
            let mut step: Vec<RowChunk> = Vec::new();
            for sequence in 0..3 {
                let mut left = self.len(sequence) - done[sequence];
                match sequence {
                    // The second sequence needs the shared blocks while the first one still has
                    // them.
                    0 if done[0] < self.shared => left = self.shared - done[0],
                    1 if done[0] < self.shared => left = 0,
                    _ => {}
                }
                let begins = sequence == 1 && done[1] == self.shared;
                if left > 0 && (begins || below(random, 3) > 0) {
                    let most = [1, 7, 60][below(random, 3)];
                    let rows = left.min(1 + below(random, most));
                    step.push((sequence, rows));
                }
            }
            for &(sequence, rows) in &step {
                done[sequence] += rows;
            }
            steps.push(step);
        }
        steps
    }

    /// Returns the attention of each layer for each token: `[sequence][layer]`. Shared tokens of
    /// the second sequence get zeros.
    pub(crate) fn run<B: Backend>(&self, b: &mut B, way: &WindowSchedule<'_>) -> Vec<Vec<Vec<f32>>> {
        let AttentionSpec { heads, kv_heads, head_dim, .. } = self.spec;
        let (kv_width, width) = (kv_heads * head_dim, heads * head_dim);
        let (bt, layout) = (self.block_tokens, self.layout());
        let groups = layout.groups().len();
        let mut kv = b.kv(&layout).unwrap();
        let mut at = Tables {
            holders: vec![0; layout.blocks],
            free: (1..layout.blocks as u32).collect(),
            tables: vec![vec![Vec::new(); groups]; 3],
        };
        let mut done = [0; 3];
        let mut out: Vec<Vec<Vec<f32>>> =
            (0..3).map(|sequence| vec![vec![0.0; self.len(sequence) * width]; layout.layers.len()]).collect();
        for step in way.steps.iter().filter(|step| !step.is_empty()) {
            self.allocate_blocks(&mut at, &layout, way, step, &mut done);
            let (mut positions, mut sequences, mut slots) = (Vec::new(), Vec::new(), Vec::new());
            let mut data = [const { Vec::new() }; 3];
            for (index, &(sequence, rows)) in step.iter().enumerate() {
                for position in done[sequence]..done[sequence] + rows {
                    positions.push(position as u32);
                    sequences.push(index as u32);
                    slots.extend(
                        at.tables[sequence]
                            .iter()
                            .map(|table| table[position / bt] * bt as u32 + (position % bt) as u32),
                    );
                }
                for ((data, rows_of), width) in
                    data.iter_mut().zip(&self.rows[sequence]).zip([kv_width, kv_width, width])
                {
                    data.extend_from_slice(&rows_of[done[sequence] * width..(done[sequence] + rows) * width]);
                }
            }
            let tables: Vec<&[u32]> =
                step.iter().flat_map(|&(sequence, _)| &at.tables[sequence]).map(Vec::as_slice).collect();
            let count = positions.len();
            let tokens = vec![0; count];
            b.begin(&Step {
                tokens: &tokens,
                positions: &positions,
                sequences: &sequences,
                kv_slots: &slots,
                tables: &tables,
                outputs: &[],
            })
            .unwrap();
            let [keys, values] = [0, 1].map(|which| filled(b, count, kv_width, &data[which]));
            let queries = filled(b, count, width, &data[2]);
            let mut attended = b.tensor(count, width).unwrap();
            let mut host = vec![0.0; count * width];
            for (layer, _) in layout.layers.iter().enumerate() {
                // Every second layer swaps keys and values, so that no two layers of a block are
                // equal.
                let (keys, values) = if layer % 2 == 0 { (&keys, &values) } else { (&values, &keys) };
                b.kv_write(&mut kv, layer, keys, values, count).unwrap();
                b.attention(&kv, layer, &queries, &self.spec, &mut attended, count).unwrap();
                b.read(&attended, count, &mut host).unwrap();
                let mut rest = &host[..];
                for &(sequence, rows) in step {
                    let (now, later) = rest.split_at(rows * width);
                    out[sequence][layer][done[sequence] * width..][..now.len()].copy_from_slice(now);
                    rest = later;
                }
            }
            for &(sequence, rows) in step {
                done[sequence] += rows;
            }
        }
        out[1].iter_mut().for_each(|layer| layer[..self.shared * width].fill(0.0));
        out
    }

    /// Gives each sequence of a step the blocks for its rows. Before that, it frees and shares
    /// blocks as the schedule says.
    fn allocate_blocks(
        &self,
        at: &mut Tables,
        layout: &KvLayout,
        way: &WindowSchedule<'_>,
        step: &[RowChunk],
        done: &mut [usize; 3],
    ) {
        let bt = self.block_tokens;
        for &(sequence, rows) in step {
            if way.shares && sequence == 1 && done[1] == 0 {
                self.share(at, layout);
                done[1] = self.shared;
            }
            for (group, of) in layout.groups().iter().enumerate() {
                if way.frees {
                    let blocks = at.tables[sequence][group].len();
                    at.leave(sequence, group, (of.span.first_position(done[sequence]) / bt).min(blocks));
                }
                while at.tables[sequence][group].len() * bt < done[sequence] + rows {
                    let block = at.take();
                    at.tables[sequence][group].push(block);
                }
            }
        }
    }

    /// The second sequence retains those blocks of the first one that a row after the shared tokens
    /// attends to.
    fn share(&self, at: &mut Tables, layout: &KvLayout) {
        for (group, of) in layout.groups().iter().enumerate() {
            let first = of.span.first_position(self.shared) / self.block_tokens;
            let end = self.shared / self.block_tokens;
            let mut table = vec![0; end];
            for (own, &block) in table.iter_mut().zip(&at.tables[0][group]).skip(first) {
                *own = block;
                at.holders[block as usize] += 1;
            }
            at.tables[1][group] = table;
        }
    }
}

/// Windows shorter and longer than blocks, tiles and sequences, in caches of all types.
pub(crate) fn cases(random: &mut SplitMix64, head_dims: &[usize]) -> impl Iterator<Item = WindowCase> {
    let shapes = [(16, 1), (16, 15), (16, 16), (16, 33), (16, 64), (16, 257), (16, 1000), (1, 5), (3, 17)];
    let more = [(7, 40), (32, 20), (32, 300), (64, 63), (16, 100), (5, 256)];
    shapes.into_iter().chain(more).enumerate().map(|(index, (block_tokens, window))| {
        let shared = block_tokens * below(random, 300 / block_tokens);
        WindowCase::new(random, head_dims, KvType::ALL[index % 4], block_tokens, window, shared)
    })
}

/// What a backend says to reads and steps that do not fit the groups, and the bytes of its cache.
pub(crate) struct Refusals {
    pub(crate) texts: [String; 3],
    /// After each group has written a block.
    pub(crate) two_blocks: u64,
    /// After a copy of the first one.
    pub(crate) after_copy: u64,
    /// After the second group has written the first block.
    pub(crate) after_change: u64,
}

pub(crate) fn refusals<B: Backend>(b: &mut B) -> Refusals {
    let layer = |span| KvLayer { kv_heads: 1, head_dim: 16, kind: KvType::F16, span };
    let layers = vec![layer(AttentionSpan::Full), layer(AttentionSpan::Window { tokens: 4 })];
    let mut kv = b.kv(&KvLayout { block_tokens: 4, blocks: 4, layers }).unwrap();
    let spec = AttentionSpec { heads: 1, kv_heads: 1, head_dim: 16, scale: 1.0 };
    let x = filled(b, 1, 16, &[1.0; 16]);
    let mut out = b.tensor(1, 16).unwrap();
    let step = |kv_slots| Step {
        tokens: &[0],
        positions: &[0],
        sequences: &[0],
        kv_slots,
        tables: &[&[1], &[2]],
        outputs: &[],
    };
    b.begin(&step(&[4, 8])).unwrap();
    b.kv_write(&mut kv, 0, &x, &x, 1).unwrap();
    b.kv_write(&mut kv, 1, &x, &x, 1).unwrap();
    b.attention(&kv, 0, &x, &spec, &mut out, 1).unwrap();
    b.attention(&kv, 1, &x, &spec, &mut out, 1).unwrap();
    let two_blocks = b.kv_bytes(&kv);
    b.kv_copy(&mut kv, &[(1, 3)]).unwrap();
    let after_copy = b.kv_bytes(&kv);
    // Block 1 now belongs to the other group.
    b.begin(&step(&[12, 4])).unwrap();
    b.kv_write(&mut kv, 1, &x, &x, 1).unwrap();
    let after_change = b.kv_bytes(&kv);
    let text = |result: Result<(), OpError>| result.unwrap_err().to_string();
    let read = text(b.attention(&kv, 0, &x, &spec, &mut out, 1));
    // Tables for one group, although there are two groups.
    b.begin(&Step { kv_slots: &[4], ..step(&[]) }).unwrap();
    let write = text(b.kv_write(&mut kv, 0, &x, &x, 1));
    let begin = text(b.begin(&Step { tables: &[&[1], &[2], &[3]], ..step(&[4, 8]) }));
    Refusals { texts: [read, write, begin], two_blocks, after_copy, after_change }
}
