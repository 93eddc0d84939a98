// SPDX-License-Identifier: Apache-2.0

//! Malformed keys and values.

use super::check;
use super::raw::{ARRAY, RawGguf, STRING, U8, U32, array, key, pair};

#[test]
fn malformed_keys_and_values_are_refused() {
    check_pair(
        "CVE-2024-32878: cut in the middle of the keys",
        key("general.name"),
        "in the metadata: cannot read the value of key general.name: 4 bytes are needed at byte 44, but only 0 are left: the file is cut off or damaged",
    );
    check_pair("empty key", [key(""), vec![0; 9]].concat(), "in the metadata: key 0 at byte 24 is empty");
    check_pair(
        "key longer than keys are",
        [70_000_u64.to_le_bytes().to_vec(), vec![b'k'; 70_010]].concat(),
        "in the metadata: key 0 at byte 24 claims 70000 bytes; the limit is 65535",
    );
    check_pair(
        "CVE-2024-23496: key length that wraps when one is added",
        [u64::MAX.to_le_bytes().to_vec(), vec![0; 16]].concat(),
        "in the metadata: key 0 at byte 24 claims 18446744073709551615 bytes; the limit is 65535",
    );
    check_pair(
        "key longer than the file",
        [100_u64.to_le_bytes().to_vec(), vec![b'k'; 16]].concat(),
        "in the metadata: cannot read key number 0: 100 bytes are needed at byte 32, but only 16 are left: the file is cut off or damaged",
    );
    check_pair(
        "key that is not UTF-8",
        [1_u64.to_le_bytes().to_vec(), vec![0xff; 16]].concat(),
        "in the metadata: key 0 at byte 24 is not UTF-8",
    );
    check_pair(
        "value type 13",
        pair("a", 13, &[0; 8]),
        "in the metadata: key a has the unknown value type 13 at byte 33 (known: 0 to 12)",
    );
    check_pair(
        "value type -1",
        pair("a", u32::MAX, &[0; 8]),
        "in the metadata: key a has the unknown value type 4294967295 at byte 33 (known: 0 to 12)",
    );
    check_pair(
        "number that is cut off",
        pair("a", 10, &[0; 7]),
        "in the metadata: cannot read the value of key a: 8 bytes are needed at byte 37, but only 7 are left: the file is cut off or damaged",
    );
    let twice = vec![pair("a", U32, &[0; 4]), pair("a", U8, &[0; 10])];
    check(
        "duplicate key",
        RawGguf { pairs: twice, ..RawGguf::default() }.bytes(),
        "in the metadata: key a at byte 41 occurs twice",
    );
}

#[test]
fn malformed_strings_and_arrays_are_refused() {
    check_pair(
        "CVE-2024-25665: string longer than the file",
        pair("a", STRING, &1_u64.to_le_bytes()),
        "in the metadata: key a has a string of 1 bytes at byte 37, but only 0 are left",
    );
    check_pair(
        "CVE-2024-21825: string length that wraps when one is added",
        pair("a", STRING, &u64::MAX.to_le_bytes()),
        "in the metadata: key a has a string of 18446744073709551615 bytes at byte 37, but only 0 are left",
    );
    check_pair(
        "CVE-2025-49847: text longer than i32 counts",
        pair("a", STRING, &(1_u64 << 31).to_le_bytes()),
        "in the metadata: key a has a string of 2147483648 bytes at byte 37, but only 0 are left",
    );
    check_pair(
        "element type 13",
        array("a", 13, 0, &[0; 8]),
        "in the metadata: key a has the unknown value type 13 at byte 37 (known: 0 to 12)",
    );
    check_pair(
        "array of arrays",
        array("a", ARRAY, 1, &[0; 24]),
        "in the metadata: key a is an array of arrays at byte 37, which is not supported",
    );
    check_pair(
        "array without its length",
        pair("a", ARRAY, &U32.to_le_bytes()),
        "in the metadata: cannot read the value of key a: 8 bytes are needed at byte 41, but only 0 are left: the file is cut off or damaged",
    );
    check_pair(
        "CVE-2024-25667: array longer than the file",
        array("a", U8, 9, &[0; 8]),
        "in the metadata: key a has an array of 9 values of type u8 at byte 41, but only 8 bytes are left",
    );
    check_pair(
        "CVE-2025-0312: array whose size wraps",
        array("a", U32, (1 << 62) + 1, &[0; 8]),
        "in the metadata: key a has an array of 4611686018427387905 values of type u32 at byte 41, but only 8 bytes are left",
    );
    check_pair(
        "CVE-2024-25668: array of more strings than can be there",
        array("a", STRING, 2, &[0; 15]),
        "in the metadata: key a has an array of 2 values of type string at byte 41, but only 15 bytes are left",
    );
    check_pair(
        "CVE-2024-25668: string in an array longer than the file",
        array("a", STRING, 1, &9_u64.to_le_bytes()),
        "in the metadata: key a has a string of 9 bytes at byte 49, but only 0 are left",
    );
}

#[test]
fn impossible_alignments_are_refused() {
    check_pair(
        "CVE-2025-0317: alignment 0",
        pair("general.alignment", U32, &0_u32.to_le_bytes()),
        "general.alignment is 0 but must be a power of two up to 2097152",
    );
    check_pair(
        "alignment 13",
        pair("general.alignment", U32, &13_u32.to_le_bytes()),
        "general.alignment is 13 but must be a power of two up to 2097152",
    );
    check_pair(
        "llama.cpp#26318: alignment 2^31",
        pair("general.alignment", U32, &(1_u32 << 31).to_le_bytes()),
        "general.alignment is 2147483648 but must be a power of two up to 2097152",
    );
    check_pair(
        "llama.cpp#24997: alignment as u64",
        pair("general.alignment", 10, &32_u64.to_le_bytes()),
        "general.alignment has type u64 but must be u32",
    );
    check_pair(
        "alignment as text",
        pair("general.alignment", STRING, &0_u64.to_le_bytes()),
        "general.alignment has type string but must be u32",
    );
}

fn check_pair(case: &str, pair: Vec<u8>, expected: &str) {
    check(case, RawGguf { pairs: vec![pair], ..RawGguf::default() }.bytes(), expected);
}
