// SPDX-License-Identifier: Apache-2.0

//! Malformed files: each kind gives its own error, which says what is wrong and where.
//!
//! The cases come from the limits that llama.cpp enforces, from its hand-crafted tests, and from
//! published vulnerabilities of GGUF readers, which are named by CVE number.

mod metadata;
mod model_keys;
mod raw;
mod tensors;

use gguf::Header;
use raw::RawGguf;
use std::error::Error;

#[test]
fn malformed_fixed_parts_are_refused() {
    check(
        "empty file",
        vec![],
        "cannot read the counts at the start of the file: 4 bytes are needed at byte 0, but only 0 are left: the file is cut off or damaged",
    );
    check(
        "wrong magic",
        b"GGML\x03\0\0\0".to_vec(),
        "not a GGUF file: it begins with [47, 47, 4d, 4c] instead of \"GGUF\"",
    );
    check(
        "version 0",
        RawGguf { version: 0, ..RawGguf::default() }.bytes(),
        "GGUF version 0 is not supported, only 2 and 3 are: convert the model again",
    );
    check(
        "CVE-2025-66960: version 1 with its shorter counts",
        RawGguf { version: 1, ..RawGguf::default() }.bytes(),
        "GGUF version 1 is not supported, only 2 and 3 are: convert the model again",
    );
    check(
        "version of the future",
        RawGguf { version: 4, ..RawGguf::default() }.bytes(),
        "GGUF version 4 is not supported, only 2 and 3 are: convert the model again",
    );
    check(
        "big-endian",
        RawGguf { version: 3_u32.swap_bytes(), ..RawGguf::default() }.bytes(),
        "the file is big-endian (version field 0x03000000): convert it to little-endian first",
    );
    check(
        "no counts",
        b"GGUF\x03\0\0\0\0\0".to_vec(),
        "cannot read the counts at the start of the file: 8 bytes are needed at byte 8, but only 2 are left: the file is cut off or damaged",
    );
    check(
        "CVE-2024-23605: number of keys whose product wraps",
        RawGguf { keys: Some(u64::MAX / 64 + 2), ..RawGguf::default() }.bytes(),
        "the file claims 288230376151711745 keys, but at most 0 fit (0 bytes are left)",
    );
    check(
        "CVE-2024-25664: number of keys -1",
        RawGguf { keys: Some(u64::MAX), ..RawGguf::default() }.bytes(),
        "the file claims 18446744073709551615 keys, but at most 0 fit (0 bytes are left)",
    );
    check(
        "CVE-2024-21836: number of tensors whose product wraps",
        RawGguf { tensors: Some(u64::MAX / 80 + 2), ..RawGguf::default() }.bytes(),
        "the file claims 230584300921369397 tensors, but at most 0 fit (0 bytes are left)",
    );
    check(
        "CVE-2024-25666: number of tensors -1",
        RawGguf { tensors: Some(u64::MAX), ..RawGguf::default() }.bytes(),
        "the file claims 18446744073709551615 tensors, but at most 0 fit (0 bytes are left)",
    );
    check(
        "CVE-2025-0315: more keys than any model has, with room for them",
        RawGguf { keys: Some(100_000), data: vec![0; 4 << 20], ..RawGguf::default() }.bytes(),
        "the file claims 100000 keys, but at most 16384 fit (4194304 bytes are left)",
    );
    check(
        "more tensors than any model has, with room for them",
        RawGguf { tensors: Some(150_000), data: vec![0; 8 << 20], ..RawGguf::default() }.bytes(),
        "the file claims 150000 tensors, but at most 131072 fit (8388608 bytes are left)",
    );
}

pub(crate) fn check(case: &str, file: Vec<u8>, expected: &str) {
    let error = Header::read(&file[..], file.len() as u64).expect_err(case);
    assert_eq!(chain(&error), expected, "{case}");
}

/// An error's message with those of its sources.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
