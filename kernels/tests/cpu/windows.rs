// SPDX-License-Identifier: Apache-2.0

//! Checks models with attention windows in some layers. Each KV cache group has its own block
//! tables. Blocks before a window are freed, and other sequences reuse them. The bits of the
//! results depend on neither freed blocks, prefill chunks, batch neighbours nor shared blocks.

use kernels::{Cpu, Isa};
use ops::{KvType, Reference};

use crate::split_mix::SplitMix64;
use crate::window_case::{Refusals, WindowCase, WindowSchedule, cases, refusals};

const HEAD_DIMS: [usize; 4] = [8, 16, 20, 40];

#[test]
fn windows_match_the_reference() {
    let random = &mut SplitMix64(21);
    let order = &mut SplitMix64(22);
    for case in cases(random, &HEAD_DIMS) {
        let steps = case.together(order);
        let way = WindowSchedule { steps: &steps, frees: true, shares: true };
        let expected = case.run(&mut Reference::new(), &way);
        let largest = expected.iter().flatten().flatten().fold(0.0_f32, |max, x| max.max(x.abs()));
        for isa in Isa::available() {
            let found = case.run(&mut Cpu::with_isa(2, isa).unwrap(), &way);
            let all = found.iter().flatten().flatten().zip(expected.iter().flatten().flatten());
            for (found, expected) in all {
                let (bt, window) = (case.block_tokens, case.window);
                let near = (found - expected).abs() <= 2e-6 * largest;
                assert!(near, "{isa}, {bt} a block, window {window}: {found:e}, not {expected:e}");
            }
        }
    }
}

/// A window that is longer than the context must give the same result as full attention.
#[test]
fn a_window_longer_than_the_context_equals_full_attention() {
    let mut case = WindowCase::new(&mut SplitMix64(23), &HEAD_DIMS, KvType::F16, 16, 5_000, 0);
    let alone = case.alone();
    let way = WindowSchedule { steps: &alone, frees: false, shares: false };
    for isa in Isa::available() {
        let with_window = case.run(&mut Cpu::with_isa(1, isa).unwrap(), &way);
        // Layers 2 and 4 have the same keys and values. Layer 2 attends to all of them, layer 4 has
        // a window.
        assert!(with_window.iter().all(|layers| layers[2] == layers[4]), "{isa}");
        case.window = 40;
        let with_window = case.run(&mut Cpu::with_isa(1, isa).unwrap(), &way);
        assert!(with_window[0][2] != with_window[0][4], "{isa}: the window is not looked at");
        case.window = 5_000;
    }
}

#[test]
fn windows_do_not_depend_on_chunks_batch_neighbours_or_freed_blocks() {
    let random = &mut SplitMix64(24);
    let order = &mut SplitMix64(25);
    for case in cases(random, &HEAD_DIMS) {
        let alone = case.alone();
        let (bt, window) = (case.block_tokens, case.window);
        for isa in Isa::available() {
            let way = WindowSchedule { steps: &alone, frees: false, shares: false };
            let expected = case.run(&mut Cpu::with_isa(1, isa).unwrap(), &way);
            for threads in [1, 3, 16] {
                let steps = case.together(order);
                let way = WindowSchedule { steps: &steps, frees: true, shares: true };
                let found = case.run(&mut Cpu::with_isa(threads, isa).unwrap(), &way);
                assert!(found == expected, "{isa}, {threads} threads, {bt} a block, window {window}");
            }
        }
    }
}

/// A block belongs to the group that wrote it last. A read by another group is an error.
#[test]
fn a_block_of_another_group_is_refused() {
    let expected = [
        "attention: block 1 of the KV cache is read before it is written",
        "kv_write: number of the step's groups is 1, expected 2",
        "begin: number of block tables is 3, expected 2",
    ];
    let by_reference = refusals(&mut Reference::new());
    let by_kernels = refusals(&mut Cpu::new(1).unwrap());
    for Refusals { texts, two_blocks, after_copy, after_change } in [by_reference, by_kernels] {
        assert_eq!(texts, expected);
        assert_eq!(after_copy, two_blocks / 2 * 3);
        assert_eq!(after_change, after_copy, "a block is counted once");
    }
}
