//! Every kind of malformed file is refused with an error of its own that says what and where.
//!
//! Cases come from the limits of the format as llama.cpp enforces them, its hand-crafted tests, and the published
//! vulnerabilities of GGUF readers; the CVE numbers name those.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod raw;

use gguf::{Header, check_model};
use raw::{File, array, key, pair, tensor};
use std::error::Error;

/// Tensor types.
const F32_TYPE: u32 = 0;
const I8_TYPE: u32 = 24;
const F64_TYPE: u32 = 28;
const Q4_0_TYPE: u32 = 2;
const Q8_0_TYPE: u32 = 8;

/// Value types.
const U8: u32 = 0;
const U32: u32 = 4;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

#[test]
fn fixed_part() {
    check(
        "empty file",
        vec![],
        "the fixed part at the file's start: 4 bytes are needed at byte 0, but only 0 are left: the file is cut off or damaged",
    );
    check(
        "wrong magic",
        b"GGML\x03\0\0\0".to_vec(),
        "the file begins with [47, 47, 4d, 4c], not with \"GGUF\": it is no GGUF file",
    );
    check(
        "version 0",
        File { version: 0, ..File::default() }.bytes(),
        "GGUF version 0 is not supported, only 2 and 3 are: convert the model again",
    );
    check(
        "CVE-2025-66960: version 1 with its shorter counts",
        File { version: 1, ..File::default() }.bytes(),
        "GGUF version 1 is not supported, only 2 and 3 are: convert the model again",
    );
    check(
        "version of the future",
        File { version: 4, ..File::default() }.bytes(),
        "GGUF version 4 is not supported, only 2 and 3 are: convert the model again",
    );
    check(
        "big-endian",
        File { version: 3_u32.swap_bytes(), ..File::default() }.bytes(),
        "the file is big-endian (version field 0x03000000): convert it to little-endian first",
    );
    check(
        "no counts",
        b"GGUF\x03\0\0\0\0\0".to_vec(),
        "the fixed part at the file's start: 8 bytes are needed at byte 8, but only 2 are left: the file is cut off or damaged",
    );
    check(
        "CVE-2024-23605: number of keys whose product wraps",
        File { keys: Some(u64::MAX / 64 + 2), ..File::default() }.bytes(),
        "the file claims 288230376151711745 keys, and can have at most 0 (0 bytes are left)",
    );
    check(
        "number of keys -1",
        File { keys: Some(u64::MAX), ..File::default() }.bytes(),
        "the file claims 18446744073709551615 keys, and can have at most 0 (0 bytes are left)",
    );
    check(
        "CVE-2024-21836: number of tensors whose product wraps",
        File { tensors: Some(u64::MAX / 80 + 2), ..File::default() }.bytes(),
        "the file claims 230584300921369397 tensors, and can have at most 0 (0 bytes are left)",
    );
    check(
        "number of tensors -1",
        File { tensors: Some(u64::MAX), ..File::default() }.bytes(),
        "the file claims 18446744073709551615 tensors, and can have at most 0 (0 bytes are left)",
    );
    check(
        "CVE-2025-0315: more keys than any model has, with room for them",
        File { keys: Some(100_000), data: vec![0; 4 << 20], ..File::default() }.bytes(),
        "the file claims 100000 keys, and can have at most 16384 (4194304 bytes are left)",
    );
    check(
        "more tensors than any model has, with room for them",
        File { tensors: Some(150_000), data: vec![0; 8 << 20], ..File::default() }.bytes(),
        "the file claims 150000 tensors, and can have at most 131072 (8388608 bytes are left)",
    );
}

#[test]
fn metadata() {
    check_pair(
        "CVE-2024-32878: cut in the middle of the keys",
        key("general.name"),
        "in the metadata: value of key general.name: 4 bytes are needed at byte 44, but only 0 are left: the file is cut off or damaged",
    );
    check_pair("empty key", [key(""), vec![0; 9]].concat(), "in the metadata: key 0 at byte 24 is empty");
    check_pair(
        "key longer than keys are",
        [70_000_u64.to_le_bytes().to_vec(), vec![b'k'; 70_010]].concat(),
        "in the metadata: key 0 at byte 24 claims 70000 bytes, and a key has at most 65535",
    );
    check_pair(
        "CVE-2024-23496: key length that wraps when one is added",
        [u64::MAX.to_le_bytes().to_vec(), vec![0; 16]].concat(),
        "in the metadata: key 0 at byte 24 claims 18446744073709551615 bytes, and a key has at most 65535",
    );
    check_pair(
        "key longer than the file",
        [100_u64.to_le_bytes().to_vec(), vec![b'k'; 16]].concat(),
        "in the metadata: key 0 (counted from 0): 100 bytes are needed at byte 32, but only 16 are left: the file is cut off or damaged",
    );
    check_pair(
        "key that is not UTF-8",
        [1_u64.to_le_bytes().to_vec(), vec![0xff; 16]].concat(),
        "in the metadata: key 0 at byte 24 is not UTF-8",
    );
    check_pair(
        "value type 13",
        pair("a", 13, &[0; 8]),
        "in the metadata: key a has value type 13 at byte 33, and types go from 0 to 12",
    );
    check_pair(
        "value type -1",
        pair("a", u32::MAX, &[0; 8]),
        "in the metadata: key a has value type 4294967295 at byte 33, and types go from 0 to 12",
    );
    check_pair(
        "number that is cut off",
        pair("a", 10, &[0; 7]),
        "in the metadata: value of key a: 8 bytes are needed at byte 37, but only 7 are left: the file is cut off or damaged",
    );
    check_pair(
        "CVE-2024-25665: string longer than the file",
        pair("a", STRING, &1_u64.to_le_bytes()),
        "in the metadata: key a has a string of 1 bytes at byte 37, where only 0 are left",
    );
    check_pair(
        "CVE-2024-21825: string length that wraps when one is added",
        pair("a", STRING, &u64::MAX.to_le_bytes()),
        "in the metadata: key a has a string of 18446744073709551615 bytes at byte 37, where only 0 are left",
    );
    check_pair(
        "CVE-2025-49847: text longer than i32 counts",
        pair("a", STRING, &(1_u64 << 31).to_le_bytes()),
        "in the metadata: key a has a string of 2147483648 bytes at byte 37, where only 0 are left",
    );
    check_pair(
        "element type 13",
        array("a", 13, 0, &[0; 8]),
        "in the metadata: key a has value type 13 at byte 37, and types go from 0 to 12",
    );
    check_pair(
        "array of arrays",
        array("a", ARRAY, 1, &[0; 24]),
        "in the metadata: key a is an array of arrays at byte 37, which is not supported",
    );
    check_pair(
        "array without its length",
        pair("a", ARRAY, &U32.to_le_bytes()),
        "in the metadata: value of key a: 8 bytes are needed at byte 41, but only 0 are left: the file is cut off or damaged",
    );
    check_pair(
        "CVE-2024-25667: array longer than the file",
        array("a", U8, 9, &[0; 8]),
        "in the metadata: key a has an array of 9 values of type u8 at byte 41, where only 8 bytes are left",
    );
    check_pair(
        "CVE-2025-0312: array whose size wraps",
        array("a", U32, (1 << 62) + 1, &[0; 8]),
        "in the metadata: key a has an array of 4611686018427387905 values of type u32 at byte 41, where only 8 bytes are left",
    );
    check_pair(
        "CVE-2024-25668: array of more strings than can be there",
        array("a", STRING, 2, &[0; 15]),
        "in the metadata: key a has an array of 2 values of type string at byte 41, where only 15 bytes are left",
    );
    check_pair(
        "CVE-2024-25666: string in an array longer than the file",
        array("a", STRING, 1, &9_u64.to_le_bytes()),
        "in the metadata: key a has a string of 9 bytes at byte 49, where only 0 are left",
    );
    let twice = vec![pair("a", U32, &[0; 4]), pair("a", U8, &[0; 10])];
    check(
        "duplicate key",
        File { pairs: twice, ..File::default() }.bytes(),
        "in the metadata: key a at byte 41 occurs twice",
    );
}

#[test]
fn alignment() {
    check_pair(
        "CVE-2025-0317: alignment 0",
        pair("general.alignment", U32, &0_u32.to_le_bytes()),
        "general.alignment is 0, and must be a power of two up to 2097152",
    );
    check_pair(
        "alignment 13",
        pair("general.alignment", U32, &13_u32.to_le_bytes()),
        "general.alignment is 13, and must be a power of two up to 2097152",
    );
    check_pair(
        "llama.cpp#26318: alignment 2^31",
        pair("general.alignment", U32, &(1_u32 << 31).to_le_bytes()),
        "general.alignment is 2147483648, and must be a power of two up to 2097152",
    );
    check_pair(
        "llama.cpp#24997: alignment as u64",
        pair("general.alignment", 10, &32_u64.to_le_bytes()),
        "general.alignment is of type u64, and must be u32",
    );
    check_pair(
        "alignment as text",
        pair("general.alignment", STRING, &0_u64.to_le_bytes()),
        "general.alignment is of type string, and must be u32",
    );
}

#[test]
fn tensor_table() {
    check_tensor(
        "cut in a name",
        [&40_u64.to_le_bytes()[..], &[b'n'; 30]].concat(),
        0,
        "in the tensor table: tensor 0 (counted from 0): 40 bytes are needed at byte 32, but only 30 are left: the file is cut off or damaged",
    );
    check_tensor(
        "empty name",
        tensor("", &[32], F32_TYPE, 0),
        128,
        "in the tensor table: tensor 0 at byte 24 has no name",
    );
    check_tensor(
        "name of 64 bytes",
        tensor(&"n".repeat(64), &[32], F32_TYPE, 0),
        128,
        "in the tensor table: tensor 0 at byte 24 claims a name of 64 bytes, and a name has at most 63",
    );
    check_tensor(
        "name length that wraps",
        [u64::MAX.to_le_bytes().to_vec(), vec![0; 32]].concat(),
        0,
        "in the tensor table: tensor 0 at byte 24 claims a name of 18446744073709551615 bytes, and a name has at most 63",
    );
    check_tensor(
        "name that is not UTF-8",
        [1_u64.to_le_bytes().to_vec(), vec![0xff; 32]].concat(),
        0,
        "in the tensor table: the name of tensor 0 at byte 24 is not UTF-8",
    );
    check_tensor(
        "CVE-2024-21802: five dimensions",
        tensor("t", &[1; 5], F32_TYPE, 0),
        128,
        "in the tensor table: tensor t has 5 dimensions at byte 33, and at most 4 are possible",
    );
    check_tensor(
        "dimensions 2^32-1",
        [tensor("t", &[], F32_TYPE, 0)[..9].to_vec(), vec![0xff; 24]].concat(),
        0,
        "in the tensor table: tensor t has 4294967295 dimensions at byte 33, and at most 4 are possible",
    );
    check_tensor(
        "negative dimension",
        tensor("t", &[32, u64::MAX], F32_TYPE, 0),
        128,
        "in the tensor table: tensor t has the negative dimension -1 at byte 45",
    );
    check_tensor(
        "cut in the dimensions",
        tensor("t", &[32, 32], F32_TYPE, 0)[..25].to_vec(),
        0,
        "in the tensor table: tensor t: 8 bytes are needed at byte 45, but only 4 are left: the file is cut off or damaged",
    );
    check_tensor(
        "more values than i64 counts",
        tensor("t", &[1 << 31, 1 << 31, 2], F32_TYPE, 0),
        128,
        "in the tensor table: tensor t of dimensions [2147483648, 2147483648, 2] has more values than 63 bits can count",
    );
    check_tensor(
        "product of dimensions that wraps to 0",
        tensor("t", &[1 << 32, 1 << 32, 1], F32_TYPE, 0),
        128,
        "in the tensor table: tensor t of dimensions [4294967296, 4294967296, 1] has more values than 63 bits can count",
    );
    check_tensor(
        "CVE-2026-33298: bytes that wrap before the division",
        tensor("t", &[1 << 62], F32_TYPE, 0),
        128,
        "in the tensor table: tensor t: rows of 4611686018427387904 values do not fit its type: 4611686018427387904 values of F32 have more bytes than 64 bits can count",
    );
    check_tensor(
        "bytes that wrap over the rows",
        tensor("t", &[1 << 31, 1 << 31], F32_TYPE, 0),
        128,
        "in the tensor table: tensor t: size in bytes: 4611686018427387904 values of F32 have more bytes than 64 bits can count",
    );
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
        tensor("t", &[33, 32], Q4_0_TYPE, 0),
        1024,
        "in the tensor table: tensor t: rows of 33 values do not fit its type: 33 values do not fill whole blocks of 32 as Q4_0 needs",
    );
}

#[test]
fn placement_of_tensors() {
    check_tensor(
        "first tensor not at 0",
        tensor("t", &[32], F32_TYPE, 32),
        256,
        "tensor t is at offset 32 of the tensor data, but the tensors before it end at 0",
    );
    check_tensor(
        "offset off the alignment",
        tensor("t", &[32], F32_TYPE, 1),
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
        "tensor b ends at byte 160, but the file has 159 bytes: it is cut off",
    );
    check_tensors(
        "no data at all",
        &[("a", 32, 0)],
        0,
        "tensor a ends at byte 96, but the file has 57 bytes: it is cut off",
    );
    let (big, end) = ((1 << 63) - 32, (1 << 63) - 32);
    check_tensors(
        "CVE-2025-53630: sum of sizes that wraps",
        &[("a", big, 0), ("b", big, end), ("c", 128, 2 * end)],
        64,
        "tensor a ends at byte 9223372036854775904, but the file has 192 bytes: it is cut off",
    );
    check(
        "CVE-2026-27940: a size that fits and wraps in the final sum",
        File { tensor_entries: vec![tensor("a", &[(1 << 61) - 1], F64_TYPE, 0)], ..File::default() }.bytes(),
        "the sizes of the tensors up to a add up to more than 64 bits can count",
    );
}

#[test]
fn keys_of_the_model() {
    let llama = |name: &str, value: u32| pair(&format!("llama.{name}"), U32, &value.to_le_bytes());
    let architecture = || pair("general.architecture", STRING, &text("llama"));
    let layers = || llama("block_count", 2);
    let model = |case, pairs: Vec<Vec<u8>>, expected| {
        check_file_model(
            case,
            File { pairs: [vec![architecture(), layers()], pairs].concat(), ..File::default() },
            expected,
        );
    };
    let vocabulary = |case, pairs: Vec<Vec<u8>>, expected| {
        let tokens = array("tokenizer.ggml.tokens", STRING, 2, &[text("a"), text("b")].concat());
        check_file_model(case, File { pairs: [vec![tokens], pairs].concat(), ..File::default() }, expected);
    };
    check_file_model(
        "llama.cpp#25821: 513 layers",
        File { pairs: vec![architecture(), llama("block_count", 513)], ..File::default() },
        "key llama.block_count is 513, and at most 512 is taken",
    );
    check_file_model(
        "no layers",
        File { pairs: vec![architecture(), llama("block_count", 0)], ..File::default() },
        "key llama.block_count is 0",
    );
    check_file_model(
        "architecture that is no text",
        File { pairs: vec![pair("general.architecture", U32, &[0; 4])], ..File::default() },
        "key general.architecture is of type u32, and its value cannot be taken as UTF-8 string",
    );
    check_file_model(
        "layers as text",
        File {
            pairs: vec![architecture(), pair("llama.block_count", STRING, &text("2"))],
            ..File::default()
        },
        "key llama.block_count is of type string, and its value cannot be taken as u32",
    );
    model(
        "1025 experts",
        vec![llama("expert_count", 1025)],
        "key llama.expert_count is 1025, and at most 1024 is taken",
    );
    model(
        "more experts used than there are",
        vec![llama("expert_count", 8), llama("expert_used_count", 9)],
        "llama.expert_used_count is 9, and the model has 8 experts",
    );
    model(
        "no experts used",
        vec![llama("expert_count", 8), llama("expert_used_count", 0)],
        "key llama.expert_used_count is 0",
    );
    model("no heads", vec![llama("attention.head_count", 0)], "key llama.attention.head_count is 0");
    model(
        "heads of another number of layers",
        vec![array("llama.attention.head_count", U32, 3, &[1; 12])],
        "key llama.attention.head_count has 3 values, and 2 are needed",
    );
    model(
        "heads that do not divide the embedding",
        vec![llama("embedding_length", 64), llama("attention.head_count", 3)],
        "the embedding of 64 values does not divide into 3 heads, and no attention.key_length is given",
    );
    model(
        "heads that cannot share",
        vec![llama("attention.head_count", 8), llama("attention.head_count_kv", 3)],
        "8 attention heads cannot share 3 key-value heads (layer 0)",
    );
    model(
        "key length 0",
        vec![llama("attention.head_count", 8), llama("attention.key_length", 0)],
        "key llama.attention.key_length is 0",
    );
    model(
        "rope of no dimensions",
        vec![llama("attention.head_count", 8), llama("rope.dimension_count", 0)],
        "key llama.rope.dimension_count is 0",
    );
    model(
        "rope beyond the head",
        vec![
            llama("embedding_length", 64),
            llama("attention.head_count", 8),
            llama("rope.dimension_count", 10),
        ],
        "rope.dimension_count is 10, and must be even and at most the head size",
    );
    vocabulary(
        "llama.cpp#26690: scores of the wrong type",
        vec![array("tokenizer.ggml.scores", U8, 2, &[0; 2])],
        "key tokenizer.ggml.scores is of type array of 2 u8, and its value cannot be taken as array of f32",
    );
    vocabulary(
        "llama.cpp#20735: fewer scores than tokens",
        vec![array("tokenizer.ggml.scores", 6, 1, &[0; 4])],
        "key tokenizer.ggml.scores has 1 values, and the vocabulary has 2 tokens",
    );
    vocabulary(
        "more types than tokens",
        vec![array("tokenizer.ggml.token_type", 5, 3, &[0; 12])],
        "key tokenizer.ggml.token_type has 3 values, and the vocabulary has 2 tokens",
    );
    vocabulary(
        "merges that are no texts",
        vec![array("tokenizer.ggml.merges", U32, 1, &[0; 4])],
        "key tokenizer.ggml.merges is of type array of 1 u32, and its value cannot be taken as array of strings",
    );
    vocabulary(
        "special token outside the vocabulary",
        vec![pair("tokenizer.ggml.eos_token_id", U32, &2_u32.to_le_bytes())],
        "key tokenizer.ggml.eos_token_id names token 2, and the vocabulary has 2 tokens",
    );
    let long = [70_000_u64.to_le_bytes().to_vec(), vec![b'x'; 70_000]].concat();
    check_file_model(
        "token of 70,000 bytes",
        File { pairs: vec![array("tokenizer.ggml.tokens", STRING, 1, &long)], ..File::default() },
        "token 0 has a text of 70000 bytes, and at most 65536 are taken",
    );
    let many = array("tokenizer.ggml.tokens", STRING, 1 << 21, &vec![0; 8 << 21]);
    check_file_model(
        "two million tokens",
        File { pairs: vec![many], ..File::default() },
        "key tokenizer.ggml.tokens is 2097152, and at most 1048576 is taken",
    );
}

#[test]
fn q8_0_rows_and_empty_tensors_are_accepted() {
    let entries = vec![
        tensor("a", &[64, 2], Q8_0_TYPE, 0),
        tensor("empty", &[32, 0], F32_TYPE, 160),
        tensor("scalar", &[], F32_TYPE, 160),
    ];
    let file = File { tensor_entries: entries, data: vec![0; 164], ..File::default() }.bytes();
    let header = Header::read(&file[..], file.len() as u64).unwrap();
    let sizes: Vec<_> = header.tensors().iter().map(|tensor| (tensor.values(), tensor.bytes)).collect();
    assert_eq!(sizes, [(128, 136), (0, 0), (1, 4)]);
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

fn check_pair(case: &str, pair: Vec<u8>, expected: &str) {
    check(case, File { pairs: vec![pair], ..File::default() }.bytes(), expected);
}

fn check_tensor(case: &str, entry: Vec<u8>, data: usize, expected: &str) {
    check(
        case,
        File { tensor_entries: vec![entry], data: vec![0; data], ..File::default() }.bytes(),
        expected,
    );
}

/// Tensors of type I8 as (name, bytes, offset).
fn check_tensors(case: &str, tensors: &[(&str, u64, u64)], data: usize, expected: &str) {
    let entries =
        tensors.iter().map(|(name, bytes, offset)| tensor(name, &[*bytes], I8_TYPE, *offset)).collect();
    check(case, File { tensor_entries: entries, data: vec![0; data], ..File::default() }.bytes(), expected);
}

fn check_file_model(case: &str, file: File, expected: &str) {
    let bytes = file.bytes();
    let header = Header::read(&bytes[..], bytes.len() as u64).unwrap();
    assert_eq!(chain(&check_model(header.metadata()).expect_err(case)), expected, "{case}");
}

fn check(case: &str, file: Vec<u8>, expected: &str) {
    let error = Header::read(&file[..], file.len() as u64).expect_err(case);
    assert_eq!(chain(&error), expected, "{case}");
}

/// An error's message with those of its sources.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
