// SPDX-License-Identifier: Apache-2.0

//! Fuzzes [`Header::read`]: any input gives a valid header or an error.
//!
//! Checks that nothing panics, and that every value and tensor of an accepted header can be read.

#![no_main]

use gguf::{Header, Metadata, Value, check_model};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    let Ok(header) = Header::read(file, file.len() as u64) else { return };
    let _ = check_model(header.metadata());
    for (key, value) in header.metadata().iter() {
        if let Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len, "{key}");
        }
    }
    for tensor in header.tensors() {
        let start = header.file_offset(tensor) as usize;
        assert_eq!(file[start..][..tensor.bytes as usize].len() as u64, tensor.bytes, "{}", tensor.name);
    }
    let again = Metadata::parse(header.metadata().bytes().clone()).expect("a section that was read once parses again");
    assert_eq!(again.len(), header.metadata().len());
});
