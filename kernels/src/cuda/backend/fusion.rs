// SPDX-License-Identifier: Apache-2.0

//! Kernel fusion: decides which successive commands become one launch. A launch costs more than a
//! microsecond in which the device is otherwise idle, and a decode step has hundreds of launches.
//!
//! ```text
//! products of one type with the same input            one launch of linear_*.cu
//! the same and of another type behind, for few tokens linear_mixed.cu
//! norm, gate or attention, then quantize              the kernel that also writes activation tiles
//! norm of what is added, residual sum and norm        norm.cu normalises what it adds
//! [2 norms of heads,] 2 rotations, write to the cache norm_rope_kv.cu
//! the same and attention, for decode rows             attention/raw_heads.cuh
//! norm, quantize, products, for one token             linear/matvec.cuh normalises its input
//! the same with products of another type behind       linear_mixed.cu
//! product, sum with the residual stream, likewise     linear/matvec.cuh adds its output
//! down product of a row's experts, likewise           experts/row_matvec.cuh
//! ```
//!
//! A fused launch writes the same bits to the same places as its commands would one by one, except
//! values that nothing reads (`liveness`). [`count_fusible`] decides what is fused.
//! `KernelSet::enqueue` must handle every combination that it returns.

use quant::DType;

use super::command::KernelCommand;
use super::expert_command::ExpertCommand;
use super::liveness::are_overwritten_unread;
use super::operand::FloatRange;
use crate::cuda::attention::{AttentionKernels, AttentionPlanAddress};
use crate::cuda::linear::{LinearKernels, MATRICES_MAX};
use crate::cuda::norm::NormKernels;
use crate::cuda::norm_rope_kv::NormRopeKvKernels;
use crate::cuda::quantized_output::QuantizedOutput;

/// Divides a residual sum with a norm in two, if the product before it can do the sum.
pub(super) fn divide_sums(list: &[KernelCommand]) -> Vec<KernelCommand> {
    let mut divided = Vec::with_capacity(list.len() + list.len() / 4);
    for (at, command) in list.iter().enumerate() {
        match *command {
            KernelCommand::AddNorm { x, y, weight, eps, out }
                if ends_with_addable_product(&list[..at], y) =>
            {
                divided.push(KernelCommand::Add { x, y });
                divided.push(KernelCommand::Norm { x, weight, eps, out });
            }
            other => divided.push(other),
        }
    }
    divided
}

/// Moves a command that quantizes what a norm gives from behind a product of the values themselves
/// to the norm, whose launch then quantizes.
pub(super) fn quantize_behind_norms(list: &mut [KernelCommand]) {
    for at in 2..list.len() {
        if let [
            KernelCommand::Norm { out, .. } | KernelCommand::AddNorm { out, .. },
            KernelCommand::Product { activation_tiles, .. },
            KernelCommand::Quantize { x, .. },
        ] = &list[at - 2..=at]
            && x == out
            && activation_tiles.layout.format == DType::F32
            && activation_tiles.range == out.bytes()
        {
            list.swap(at - 1, at);
        }
    }
}

/// Whether the last of `list` computes `y` and can add it to the residual stream. A product must be
/// the only one of its launch.
fn ends_with_addable_product(list: &[KernelCommand], y: FloatRange) -> bool {
    if let [.., KernelCommand::Experts(ExpertCommand::RowDown { out, .. })] = list {
        return *out == y;
    }
    let [before @ .., last @ KernelCommand::Product { activation_tiles, matrix, out, .. }] = list else {
        return false;
    };
    let is_alone = before.last().is_none_or(|other| !share_a_launch(last, other));
    is_alone && *out == y && LinearKernels::can_add(matrix.dtype, activation_tiles.tokens as usize)
}

/// Whether both are products of one type with the same input.
fn share_a_launch(one: &KernelCommand, other: &KernelCommand) -> bool {
    let key = |command: &KernelCommand| match command {
        KernelCommand::Product { activation_tiles, matrix, .. } => Some((*activation_tiles, matrix.dtype)),
        _ => None,
    };
    key(one).is_some() && key(one) == key(other)
}

/// The number of products at the beginning of `list` that one launch computes.
fn count_products(list: &[KernelCommand]) -> usize {
    let Some(first) = list.first() else { return 0 };
    list.iter().take(MATRICES_MAX).take_while(|other| share_a_launch(first, other)).count()
}

/// The number of products at the beginning of `behind` that the launch of `products` computes too,
/// with another type of weights. `can_mix` says whether a launch takes both types.
fn count_mixed(
    products: &[KernelCommand],
    behind: &[KernelCommand],
    can_mix: impl Fn(DType, DType, usize) -> bool,
) -> usize {
    let (
        [KernelCommand::Product { activation_tiles, matrix, .. }, ..],
        [KernelCommand::Product { activation_tiles: input, matrix: other, .. }, ..],
    ) = (products, behind)
    else {
        return 0;
    };
    let is_mixed = activation_tiles == input && can_mix(matrix.dtype, other.dtype, input.tokens as usize);
    if is_mixed { count_products(behind) } else { 0 }
}

/// Splits the products of a launch behind those of the first type.
pub(super) fn split_types(products: &[KernelCommand]) -> (&[KernelCommand], &[KernelCommand]) {
    products.split_at(count_products(products))
}

/// Returns the number of commands at the beginning of `list` that one launch computes. `list` is
/// not empty.
pub(super) fn count_fusible(list: &[KernelCommand], plans: &[AttentionPlanAddress]) -> usize {
    if let [KernelCommand::Product { out, .. }, ..] = list {
        let products = count_products(list);
        return match list {
            [_, KernelCommand::Add { y, .. }, ..]
                if y == out && ends_with_addable_product(&list[..1], *y) =>
            {
                2
            }
            _ => products + count_mixed(&list[..products], &list[products..], LinearKernels::can_mix),
        };
    }
    if let [KernelCommand::Experts(ExpertCommand::RowDown { out, .. }), KernelCommand::Add { y, .. }, ..] =
        list
        && out == y
    {
        return 2;
    }
    if let [
        KernelCommand::Norm { out, .. },
        KernelCommand::Quantize { x, activation_tiles },
        KernelCommand::Product { activation_tiles: input, matrix, .. },
        ..,
    ] = list
        && x == out
        && input == activation_tiles
        && LinearKernels::can_normalise(matrix.dtype, input.tokens as usize, input.cols as usize)
    {
        let products = &list[2..];
        let first = count_products(products);
        let can_mix = |first, second, _| LinearKernels::can_mix_normed(first, second);
        return 2 + first + count_mixed(&products[..first], &products[first..], can_mix);
    }
    if adds_normed(list) {
        return 1 + count_quantized(&list[1..], plans);
    }
    if is_norm_rope_kv(list) {
        let heads = if matches!(list[0], KernelCommand::Rope { .. }) { 3 } else { 5 };
        let (these, behind) = list.split_at(heads);
        return if prepares_heads(these, behind, plans) {
            heads + count_quantized(behind, plans)
        } else {
            heads
        };
    }
    count_quantized(list, plans)
}

/// Whether `list` begins with the norm of what attention or feed-forward gives, in place, and the
/// sum of it with the residual stream. The sum's launch leaves it as it is, so nothing may read it.
fn adds_normed(list: &[KernelCommand]) -> bool {
    let [KernelCommand::Norm { x, eps, out, .. }, KernelCommand::AddNorm { y, eps: other, .. }, behind @ ..] =
        list
    else {
        return false;
    };
    x == out && out == y && eps == other && are_overwritten_unread(*y, behind)
}

/// 2 if one launch computes the first command of `list` and quantizes its output, otherwise 1.
fn count_quantized(list: &[KernelCommand], plans: &[AttentionPlanAddress]) -> usize {
    if let [first, KernelCommand::Quantize { x, activation_tiles }, ..] = list
        && QuantizedOutput::supports(activation_tiles.layout.format)
    {
        let cols = activation_tiles.cols as usize;
        let made = match *first {
            KernelCommand::Norm { out, .. } | KernelCommand::AddNorm { out, .. } => {
                NormKernels::can_quantize(cols).then_some(out)
            }
            KernelCommand::Gated { gate, .. } => Some(gate),
            KernelCommand::AttentionPaged { operands, plan } => {
                let plan = &plans[plan as usize];
                AttentionKernels::can_quantize(&operands.shape.spec(), plan).then_some(operands.out)
            }
            _ => None,
        };
        if made == Some(*x) {
            return 2;
        }
    }
    1
}

/// Whether `behind` begins with attention that can do the work of `heads`, a write to the cache and
/// what is before it. Attention leaves queries and keys as they are, so nothing may read them.
fn prepares_heads(heads: &[KernelCommand], behind: &[KernelCommand], plans: &[AttentionPlanAddress]) -> bool {
    let (
        [.., KernelCommand::Rope { frequencies, .. }, KernelCommand::KvWrite { layer, kind, keys, .. }],
        [KernelCommand::AttentionPaged { operands, plan }, others @ ..],
    ) = (heads, behind)
    else {
        return false;
    };
    let head_dim = operands.shape.spec().head_dim;
    (operands.layer, operands.kind) == (*layer, *kind)
        && rotated(heads) == Some(operands.queries)
        && AttentionKernels::takes_raw_heads(&plans[*plan as usize], *kind, head_dim, frequencies.len)
        && are_overwritten_unread(operands.queries, others)
        && are_overwritten_unread(*keys, others)
}

/// The first values that commands rotate.
fn rotated(commands: &[KernelCommand]) -> Option<FloatRange> {
    commands.iter().find_map(|command| match *command {
        KernelCommand::Rope { x, .. } => Some(x),
        _ => None,
    })
}

/// Whether `list` begins with `[norm of queries, norm of keys,] rotation of queries, rotation of
/// keys, write to the cache` of the same heads.
fn is_norm_rope_kv(list: &[KernelCommand]) -> bool {
    let (normed, rest) = match list {
        [
            KernelCommand::NormHeads { x: queries, eps: first, weight: query_weight },
            KernelCommand::NormHeads { x: keys, eps: second, weight: key_weight },
            rest @ ..,
        ] if first == second && query_weight.len == key_weight.len => {
            (Some((queries, keys, query_weight.len)), rest)
        }
        rest => (None, rest),
    };
    let [
        KernelCommand::Rope { x: queries, positions, adjacent, frequencies, magnitude, head_dim },
        KernelCommand::Rope {
            x: other,
            positions: other_positions,
            adjacent: other_adjacent,
            frequencies: other_frequencies,
            magnitude: other_magnitude,
            head_dim: other_dim,
        },
        KernelCommand::KvWrite { keys, head_dim: kv_dim, .. },
        ..,
    ] = rest
    else {
        return false;
    };
    let same_turn = (positions, adjacent, frequencies, magnitude, head_dim)
        == (other_positions, other_adjacent, other_frequencies, other_magnitude, other_dim);
    let same_heads = other == keys && head_dim == kv_dim && NormRopeKvKernels::supports(*head_dim as usize);
    let norms_fit = normed.is_none_or(|normed| normed == (queries, keys, *head_dim as usize));
    same_turn && same_heads && norms_fit && queries != keys
}

#[cfg(test)]
mod tests {
    use super::super::operand::{ActivationTiles, ByteRange, WeightMatrix};
    use super::*;
    use crate::cuda::quantize::ActivationLayout;

    #[test]
    fn a_norm_of_what_is_added_is_fused_if_nothing_reads_it_later() {
        let floats = |address| FloatRange { address, len: 300 };
        let [stream, delta, normed, weight] = [0x1000, 0x2000, 0x3000, 0x4000].map(floats);
        let (eps, out) = (1e-6.into(), delta);
        let list = [
            KernelCommand::Norm { x: delta, weight, eps, out },
            KernelCommand::AddNorm { x: stream, y: delta, weight, eps, out: normed },
            KernelCommand::Norm { x: normed, weight, eps, out },
        ];
        assert_eq!(count_fusible(&list, &[]), 2);
        // The host may read what the list leaves.
        assert_eq!(count_fusible(&list[..2], &[]), 1);
        let other_eps = KernelCommand::Norm { x: delta, weight, eps: 1e-5.into(), out };
        assert_eq!(count_fusible(&[other_eps, list[1], list[2]], &[]), 1);
    }

    #[test]
    fn a_norm_quantizes_for_what_is_behind_a_product_of_its_values() {
        let floats = |address| FloatRange { address, len: 256 };
        let [stream, delta, normed, weight, logits] = [0x1000, 0x2000, 0x3000, 0x4000, 0x5000].map(floats);
        let tiles = |dtype: DType, address| ActivationTiles {
            layout: ActivationLayout::from(dtype),
            range: ByteRange { address, len: 1024 },
            tokens: 1,
            cols: 256,
        };
        let norm = KernelCommand::AddNorm { x: stream, y: delta, weight, eps: 1e-6.into(), out: normed };
        let matrix = WeightMatrix {
            dtype: DType::F32,
            range: ByteRange { address: 0x8000, len: 1 << 16 },
            cols: 256,
            rows: 64,
        };
        let router =
            |activation_tiles| KernelCommand::Product { activation_tiles, matrix, bias: None, out: logits };
        let quantize = |x| KernelCommand::Quantize { x, activation_tiles: tiles(DType::Q8_K, 0x6000) };
        let moved = |list: [KernelCommand; 3]| {
            let mut moved = list;
            quantize_behind_norms(&mut moved);
            assert!(moved == list || moved == [list[0], list[2], list[1]]);
            moved != list
        };
        let of_values = router(tiles(DType::F32, normed.address));
        assert!(moved([norm, of_values, quantize(normed)]));
        // Of other values, behind a product of others, or behind one that reads activation tiles.
        assert!(!moved([norm, of_values, quantize(stream)]));
        assert!(!moved([norm, router(tiles(DType::F32, stream.address)), quantize(normed)]));
        assert!(!moved([norm, router(tiles(DType::Q8_K, 0x6000)), quantize(normed)]));
    }
}
