// SPDX-License-Identifier: Apache-2.0

//! Fuzzes the JSON bodies of completions and chats, with tools: any body is refused with a text, or
//! gives parameters within their ranges.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| router::fuzzing::read_http_body(input));
