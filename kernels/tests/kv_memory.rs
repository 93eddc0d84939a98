// SPDX-License-Identifier: Apache-2.0

//! Measures the host memory of a KV cache. Writing a block takes memory, and trimming the cache
//! releases it. The test has a file of its own: the tests of a file share one process, and this
//! test measures the memory of its process.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kernels::Cpu;
use ops::{AttentionSpan, Backend, KvLayer, KvLayout, KvType, Step};

const MIB: u64 = 1 << 20;

/// The anonymous memory of this process that is in RAM.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

#[test]
fn first_write_takes_memory_and_trim_releases_it() {
    const BLOCKS: u32 = 2_000;
    let mut cpu = Cpu::new(1).unwrap();
    let layer = KvLayer { kv_heads: 8, head_dim: 128, kind: KvType::F16, span: AttentionSpan::Full };
    // A block has 64 KiB.
    let layout = KvLayout { block_tokens: 16, blocks: 1 << 20, layers: vec![layer] };
    let block_bytes = layout.block_bytes() as u64;
    let mut kv = cpu.kv(&layout).unwrap();
    let before = resident();
    let x = cpu.tensor(1, 8 * 128).unwrap();
    let write = |cpu: &mut Cpu, kv: &mut _, block: u32| {
        let slots = [16 * block];
        let step = Step {
            tokens: &[0],
            positions: &[0],
            sequences: &[0],
            kv_slots: &slots,
            tables: &[&[block]],
            outputs: &[],
        };
        cpu.begin(&step).unwrap();
        cpu.kv_write(kv, 0, &x, &x, 1).unwrap();
    };
    (0..BLOCKS).for_each(|block| write(&mut cpu, &mut kv, block));
    assert_eq!(cpu.kv_bytes(&kv), u64::from(BLOCKS) * block_bytes);
    let full = resident();
    // The first write to a block touches the pages of one token's keys, which are spread over the
    // block.
    assert!(full > before + 50 * MIB, "{} MiB for 2,000 blocks", (full - before) / MIB);

    cpu.trim(&mut kv, 100).unwrap();
    assert_eq!(cpu.kv_bytes(&kv), 100 * block_bytes);
    let left = resident().saturating_sub(before);
    assert!(left < 10 * MIB, "{left} bytes are left");
    // The kept blocks still have their contents. A released block must be written again.
    cpu.kv_copy(&mut kv, &[(99, 3)]).unwrap();
    assert!(cpu.kv_copy(&mut kv, &[(100, 3)]).is_err(), "block 100 was given back");
    write(&mut cpu, &mut kv, 100);
    cpu.kv_copy(&mut kv, &[(100, 3)]).unwrap();
}
