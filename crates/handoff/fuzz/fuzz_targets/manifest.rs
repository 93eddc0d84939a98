// SPDX-License-Identifier: Apache-2.0

//! Fuzzes what a successor reads from descriptors: manifests and lease records. Any bytes are
//! refused with a text, or are a valid value that is written as it was read.

#![no_main]

use bytes::Bytes;
use handoff::lease_record::LeaseRecord;
use handoff::manifest::{decode_manifest, encode_manifest};
use libfuzzer_sys::fuzz_target;
use memory::memfd::SealedMemfd;

fuzz_target!(|bytes: &[u8]| {
    match decode_manifest(Bytes::copy_from_slice(bytes)) {
        Ok(manifest) => {
            for tensor in &manifest.tensors {
                let allocation = &manifest.allocations[tensor.allocation];
                assert!(tensor.offset.checked_add(tensor.bytes).is_some_and(|end| end <= allocation.bytes));
            }
            let again = decode_manifest(encode_manifest(&manifest).into());
            assert_eq!(again.expect("a written manifest is readable"), manifest);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let memfd = SealedMemfd::from_bytes("fuzz", bytes).expect("a memfd can be made");
    match LeaseRecord::from_memfd(&memfd) {
        Ok(record) => {
            let again = record.to_memfd().expect("a memfd can be made");
            assert_eq!(LeaseRecord::from_memfd(&again).expect("a written record is readable"), record);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
