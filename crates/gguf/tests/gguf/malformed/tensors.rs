// SPDX-License-Identifier: Apache-2.0

//! Malformed tensor tables.

use super::check;
use super::raw::{F32, F64, I8, Q4_0, Q8_0, RawGguf, tensor};
use gguf::Header;

#[test]
fn malformed_tensor_names_are_refused() {
    check_tensor(
        "cut in a name",
        [&40_u64.to_le_bytes()[..], &[b'n'; 30]].concat(),
        0,
        "in the tensor table: cannot read tensor number 0: 40 bytes are needed at byte 32, but only 30 are left: the file is cut off or damaged",
    );
    check_tensor(
        "empty name",
        tensor("", &[32], F32, 0),
        128,
        "in the tensor table: tensor 0 at byte 24 has no name",
    );
    check_tensor(
        "name of 64 bytes",
        tensor(&"n".repeat(64), &[32], F32, 0),
        128,
        "in the tensor table: tensor 0 at byte 24 claims a name of 64 bytes; the limit is 63",
    );
    check_tensor(
        "name length that wraps",
        [u64::MAX.to_le_bytes().to_vec(), vec![0; 32]].concat(),
        0,
        "in the tensor table: tensor 0 at byte 24 claims a name of 18446744073709551615 bytes; the limit is 63",
    );
    check_tensor(
        "name that is not UTF-8",
        [1_u64.to_le_bytes().to_vec(), vec![0xff; 32]].concat(),
        0,
        "in the tensor table: the name of tensor 0 at byte 24 is not UTF-8",
    );
}

#[test]
fn malformed_dimensions_are_refused() {
    check_tensor(
        "CVE-2024-21802: five dimensions",
        tensor("t", &[1; 5], F32, 0),
        128,
        "in the tensor table: tensor t has 5 dimensions at byte 33; the limit is 4",
    );
    check_tensor(
        "dimensions 2^32-1",
        [tensor("t", &[], F32, 0)[..9].to_vec(), vec![0xff; 24]].concat(),
        0,
        "in the tensor table: tensor t has 4294967295 dimensions at byte 33; the limit is 4",
    );
    check_tensor(
        "negative dimension",
        tensor("t", &[32, u64::MAX], F32, 0),
        128,
        "in the tensor table: tensor t has the negative dimension -1 at byte 45",
    );
    check_tensor(
        "cut in the dimensions",
        tensor("t", &[32, 32], F32, 0)[..25].to_vec(),
        0,
        "in the tensor table: cannot read tensor t: 8 bytes are needed at byte 45, but only 4 are left: the file is cut off or damaged",
    );
    check_tensor(
        "more values than i64 counts",
        tensor("t", &[1 << 31, 1 << 31, 2], F32, 0),
        128,
        "in the tensor table: tensor t of dimensions [2147483648, 2147483648, 2] overflows 63 bits with its number of values",
    );
    check_tensor(
        "product of dimensions that wraps to 0",
        tensor("t", &[1 << 32, 1 << 32, 1], F32, 0),
        128,
        "in the tensor table: tensor t of dimensions [4294967296, 4294967296, 1] overflows 63 bits with its number of values",
    );
    check_tensor(
        "CVE-2026-33298: bytes that wrap before the division",
        tensor("t", &[1 << 62], F32, 0),
        128,
        "in the tensor table: tensor t: rows of 4611686018427387904 values do not fit its type: 4611686018427387904 values of F32 have more bytes than 64 bits can count",
    );
    check_tensor(
        "bytes that wrap over the rows",
        tensor("t", &[1 << 31, 1 << 31], F32, 0),
        128,
        "in the tensor table: cannot compute the size of tensor t: 4611686018427387904 values of F32 have more bytes than 64 bits can count",
    );
}

#[test]
fn unknown_and_unfit_types_are_refused() {
    for id in [4, 5, 31, 32, 33, 36, 37, 38] {
        check_tensor(
            "removed type",
            tensor("t", &[32], id, 0),
            128,
            &format!(
                "in the tensor table: tensor t has an unknown type at byte 45: {id} is not the id of a tensor type (known: 0 to 42 without 4, 5, 31 to 33, 36 to 38)"
            ),
        );
    }
    check_tensor(
        "CVE-2024-42477: type 43",
        tensor("t", &[32], 43, 0),
        128,
        "in the tensor table: tensor t has an unknown type at byte 45: 43 is not the id of a tensor type (known: 0 to 42 without 4, 5, 31 to 33, 36 to 38)",
    );
    check_tensor(
        "type -1",
        tensor("t", &[32], u32::MAX, 0),
        128,
        "in the tensor table: tensor t has an unknown type at byte 45: 4294967295 is not the id of a tensor type (known: 0 to 42 without 4, 5, 31 to 33, 36 to 38)",
    );
    check_tensor(
        "row that ends inside a block",
        tensor("t", &[33, 32], Q4_0, 0),
        1024,
        "in the tensor table: tensor t: rows of 33 values do not fit its type: 33 values do not fill whole blocks of 32 as Q4_0 needs",
    );
}

#[test]
fn misplaced_tensors_are_refused() {
    check_tensor(
        "first tensor not at 0",
        tensor("t", &[32], F32, 32),
        256,
        "tensor t is at offset 32 of the tensor data, but the tensors before it end at 0",
    );
    check_tensor(
        "offset off the alignment",
        tensor("t", &[32], F32, 1),
        256,
        "tensor t is at offset 1 of the tensor data, but the tensors before it end at 0",
    );
    check_tensors(
        "gap",
        &[("a", 32, 0), ("b", 32, 64)],
        256,
        "tensor b is at offset 64 of the tensor data, but the tensors before it end at 32",
    );
    check_tensors(
        "overlap",
        &[("a", 32, 0), ("b", 32, 0)],
        256,
        "tensor b is at offset 0 of the tensor data, but the tensors before it end at 32",
    );
    check_tensors(
        "reordered",
        &[("a", 32, 32), ("b", 32, 0)],
        256,
        "tensor a is at offset 32 of the tensor data, but the tensors before it end at 0",
    );
    check_tensors(
        "duplicate tensor",
        &[("a", 32, 0), ("a", 32, 32)],
        256,
        "tensor a occurs twice in the tensor table",
    );
    check_tensors(
        "CVE-2026-7482: tensor that ends beyond the file",
        &[("a", 32, 0), ("b", 32, 32)],
        63,
        "tensor b ends at byte 160, but the file has 159 bytes: it is truncated",
    );
    check_tensors(
        "no data at all",
        &[("a", 32, 0)],
        0,
        "tensor a ends at byte 96, but the file has 57 bytes: it is truncated",
    );
    let (big, end) = ((1 << 63) - 32, (1 << 63) - 32);
    check_tensors(
        "CVE-2025-53630: sum of sizes that wraps",
        &[("a", big, 0), ("b", big, end), ("c", 128, 2 * end)],
        64,
        "tensor a ends at byte 9223372036854775904, but the file has 192 bytes: it is truncated",
    );
    check(
        "CVE-2026-27940: a size that fits and wraps in the final sum",
        RawGguf { tensor_entries: vec![tensor("a", &[(1 << 61) - 1], F64, 0)], ..RawGguf::default() }.bytes(),
        "the total size of the tensors up to a overflows 64 bits",
    );
}

#[test]
fn q8_0_rows_and_empty_tensors_are_accepted() {
    let entries = vec![
        tensor("a", &[64, 2], Q8_0, 0),
        tensor("empty", &[32, 0], F32, 160),
        tensor("scalar", &[], F32, 160),
    ];
    let file = RawGguf { tensor_entries: entries, data: vec![0; 164], ..RawGguf::default() }.bytes();
    let header = Header::read(&file[..], file.len() as u64).unwrap();
    let sizes: Vec<_> = header.tensors().iter().map(|tensor| (tensor.values(), tensor.bytes)).collect();
    assert_eq!(sizes, [(128, 136), (0, 0), (1, 4)]);
}

fn check_tensor(case: &str, entry: Vec<u8>, data: usize, expected: &str) {
    check(
        case,
        RawGguf { tensor_entries: vec![entry], data: vec![0; data], ..RawGguf::default() }.bytes(),
        expected,
    );
}

/// Checks tensors of type I8, given as (name, bytes, offset).
fn check_tensors(case: &str, tensors: &[(&str, u64, u64)], data: usize, expected: &str) {
    let entries = tensors.iter().map(|(name, bytes, offset)| tensor(name, &[*bytes], I8, *offset)).collect();
    check(
        case,
        RawGguf { tensor_entries: entries, data: vec![0; data], ..RawGguf::default() }.bytes(),
        expected,
    );
}
