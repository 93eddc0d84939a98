// SPDX-License-Identifier: Apache-2.0

//! Fuzzes the messages of gRPC clients: any message is refused with a text, or gives
//! parameters within their ranges.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| router::fuzzing::read_generate_request(input));
