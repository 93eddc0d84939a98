// SPDX-License-Identifier: Apache-2.0

//! The reader reads what the writer writes. Damage anywhere gives an error or a valid header, never
//! a panic.

use gguf::{
    GgufWriter, Header, KeyError, Metadata, MetadataBuilder, StringArray, TensorLayout, Value, WriteError,
    check_model,
};
use proptest::prelude::*;
use quant::DType;

/// A file with every kind of value, a vocabulary, and tensors of several types.
fn sample() -> Vec<u8> {
    let mut metadata = MetadataBuilder::default();
    metadata.put("general.architecture", "llama").unwrap();
    metadata.put("llama.block_count", 2_u32).unwrap();
    metadata.put("llama.embedding_length", 64_u32).unwrap();
    metadata.put("llama.attention.head_count", 4_u32).unwrap();
    metadata.put("llama.attention.head_count_kv", &[2_u32, 4][..]).unwrap();
    metadata.put("llama.rope.freq_base", 1e6_f32).unwrap();
    metadata.put("llama.rope.wide", 0.5_f64).unwrap();
    metadata.put("tokenizer.ggml.add_bos_token", true).unwrap();
    metadata.put("tokenizer.ggml.tokens", &["a", "\0b", "ünï"][..]).unwrap();
    metadata.put("tokenizer.ggml.token_type", &[1_i32, 1, 3][..]).unwrap();
    metadata.put("tokenizer.ggml.scores", &[0.0_f32, -1.0, -2.5][..]).unwrap();
    metadata.put("tokenizer.ggml.eos_token_id", 2_u32).unwrap();
    for (key, value) in
        [("u8", Value::U8(1)), ("i8", Value::I8(-1)), ("u16", Value::U16(2)), ("i16", Value::I16(-2))]
    {
        metadata.put(key, value).unwrap();
    }
    metadata.put("u64", u64::MAX).unwrap();
    metadata.put("i64", i64::MIN).unwrap();
    let mut layout = TensorLayout::default();
    layout.add("token_embd.weight", DType::Q8_0, &[64, 3]).unwrap();
    layout.add("blk.0.attn_norm.weight", DType::F32, &[5]).unwrap();
    layout.add("blk.0.empty.weight", DType::F32, &[5, 0]).unwrap();
    layout.add("blk.0.ffn_down_exps.weight", DType::F16, &[3, 2, 2]).unwrap();
    let data: Vec<u8> = (0..204 + 20 + 24).map(|byte| byte as u8).collect();
    let mut writer = GgufWriter::start(Vec::new(), &metadata, layout).unwrap();
    for piece in data.chunks(7) {
        writer.write(piece).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn written_files_read_back() {
    let file = sample();
    let header = Header::read(&file[..], file.len() as u64).unwrap();
    check_model(header.metadata()).unwrap();
    assert_eq!(&file[..header.bytes().len()], &header.bytes()[..]);

    let metadata = header.metadata();
    assert_eq!(metadata.architecture(), Ok("llama"));
    assert_eq!(metadata.require::<u64>("llama.block_count"), Ok(2));
    assert_eq!(metadata.require::<f32>("llama.rope.wide"), Ok(0.5));
    assert_eq!(metadata.per_layer::<u32>("llama.attention.head_count", 2), Ok(Some(vec![4, 4])));
    assert_eq!(metadata.per_layer::<u32>("llama.attention.head_count_kv", 2), Ok(Some(vec![2, 4])));
    assert_eq!(metadata.get::<bool>("tokenizer.ggml.add_bos_token"), Ok(Some(true)));
    assert_eq!(metadata.get::<u32>("no.such.key"), Ok(None));
    let tokens: StringArray<'_> = metadata.require("tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens.iter().collect::<Vec<_>>(), [&b"a"[..], b"\0b", "ünï".as_bytes()]);

    let mut expected = (0..204 + 20 + 24).map(|byte| byte as u8);
    for tensor in header.tensors() {
        let start = header.file_offset(tensor);
        assert_eq!(start % 32, 0, "{}", tensor.name);
        for &byte in &file[start as usize..(start + tensor.bytes) as usize] {
            assert_eq!(Some(byte), expected.next(), "{}", tensor.name);
        }
    }
    assert_eq!(expected.next(), None);
    assert_eq!(file.len() % 32, 0);
}

#[test]
fn values_of_another_type_are_refused_by_name() {
    let file = sample();
    let header = Header::read(&file[..], file.len() as u64).unwrap();
    let metadata = header.metadata();
    let refused = |key: &str, wanted, found: &str| {
        Some(KeyError::Type { key: key.into(), wanted, found: found.into() })
    };
    assert_eq!(metadata.get::<u32>("i64").err(), refused("i64", "u32", "i64"));
    assert_eq!(metadata.get::<i64>("u64").err(), refused("u64", "i64", "u64"));
    assert_eq!(metadata.get::<f32>("u8").err(), refused("u8", "f32", "u8"));
    let flag = "tokenizer.ggml.add_bos_token";
    assert_eq!(metadata.get::<u32>(flag).err(), refused(flag, "u32", "bool"));
    let floats = "tokenizer.ggml.scores";
    assert_eq!(metadata.get::<Vec<u32>>(floats).err(), refused(floats, "array of u32", "array of 3 f32"));
    assert_eq!(metadata.require::<u32>("none"), Err(KeyError::Missing { key: "none".into() }));
    let heads = "llama.attention.head_count_kv";
    let count = KeyError::Count { key: heads.into(), wanted: 3, found: 2 };
    assert_eq!(metadata.per_layer::<u32>(heads, 3), Err(count));
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let mut metadata = MetadataBuilder::default();
    metadata.put("a", 1_u32).unwrap();
    assert!(matches!(metadata.put("a", 1_u32), Err(WriteError::DuplicateKey { .. })));
    assert!(matches!(metadata.put("", 1_u32), Err(WriteError::Key { .. })));
    assert!(matches!(metadata.put("general.alignment", 64_u32), Err(WriteError::Alignment)));
    let mut layout = TensorLayout::default();
    layout.add("t", DType::Q8_0, &[32]).unwrap();
    assert!(matches!(layout.add("t", DType::F32, &[1]), Err(WriteError::DuplicateTensor { .. })));
    assert!(matches!(layout.add("u", DType::Q8_0, &[33]), Err(WriteError::Tensor(_))));
    assert!(matches!(layout.add("u", DType::F32, &[]), Err(WriteError::Dims { count: 0, .. })));
    assert!(matches!(layout.add(&"n".repeat(64), DType::F32, &[1]), Err(WriteError::TensorName { .. })));

    let mut writer = GgufWriter::start(Vec::new(), &metadata, layout).unwrap();
    writer.write(&[0; 33]).unwrap();
    assert!(matches!(writer.write(&[0; 2]), Err(WriteError::TooMuchData { excess: 1 })));
    let mut layout = TensorLayout::default();
    layout.add("t", DType::Q8_0, &[32]).unwrap();
    let mut writer = GgufWriter::start(Vec::new(), &metadata, layout).unwrap();
    writer.write(&[0; 33]).unwrap();
    assert!(matches!(writer.finish(), Err(WriteError::TooLittleData { written: 33, expected: 64 })));
}

#[test]
fn every_cut_is_an_error_until_the_last_tensor_is_whole() {
    let file = sample();
    let header = Header::read(&file[..], file.len() as u64).unwrap();
    let last = header.tensors().last().unwrap();
    let end = (header.file_offset(last) + last.bytes) as usize;
    for len in 0..file.len() {
        assert_eq!(exercise(&file[..len]), len >= end, "cut at {len} of {end}");
    }
    // A file that is shorter than its stated length gives an error, too.
    for len in 0..header.bytes().len() {
        Header::read(&file[..len], file.len() as u64).unwrap_err();
    }
}

#[test]
fn i8_every_flip_of_a_byte_gives_an_error_or_a_sound_header() {
    let file = sample();
    let header_bytes = Header::read(&file[..], file.len() as u64).unwrap().bytes().len();
    for at in 0..header_bytes {
        for mask in [0x01, 0x80, 0xff] {
            let mut damaged = file.clone();
            damaged[at] ^= mask;
            exercise(&damaged);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damage_in_many_places_gives_an_error_or_a_sound_header(
        damage in prop::collection::vec((0_usize..1200, any::<u8>()), 1..24),
        cut in 0_usize..1400,
    ) {
        let mut file = sample();
        for (at, byte) in damage {
            let at = at % file.len();
            file[at] = byte;
        }
        exercise(&file[..cut.min(file.len())]);
    }

    #[test]
    fn i8_any_bytes_after_the_magic_give_an_error_or_a_sound_header(
        bytes in prop::collection::vec(any::<u8>(), 0..400),
        keys in 0_u8..4,
        tensors in 0_u8..4,
    ) {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(u64::from(tensors).to_le_bytes());
        file.extend(u64::from(keys).to_le_bytes());
        file.extend(bytes);
        exercise(&file);
        let _ = Metadata::parse(file);
    }

    #[test]
    fn any_metadata_reads_back(
        pairs in prop::collection::btree_map("[a-z.]{1,20}", (any::<u64>(), "\\PC{0,20}", prop::collection::vec(any::<i32>(), 0..8)), 0..12),
    ) {
        let mut metadata = MetadataBuilder::default();
        for (key, (number, text, array)) in &pairs {
            metadata.put(&format!("{key}/n"), *number).unwrap();
            metadata.put(&format!("{key}/t"), text.as_str()).unwrap();
            metadata.put(&format!("{key}/a"), &array[..]).unwrap();
        }
        let parsed = Metadata::parse(metadata.bytes().to_vec()).unwrap();
        prop_assert_eq!(parsed.len(), 3 * pairs.len());
        for (key, (number, text, array)) in &pairs {
            prop_assert_eq!(parsed.require::<u64>(&format!("{key}/n")), Ok(*number));
            prop_assert_eq!(parsed.require::<&str>(&format!("{key}/t")), Ok(text.as_str()));
            prop_assert_eq!(parsed.require::<Vec<i32>>(&format!("{key}/a")), Ok(array.clone()));
        }
    }
}

/// Parses a file and reads everything in it. Returns whether it was accepted.
fn exercise(file: &[u8]) -> bool {
    let Ok(header) = Header::read(file, file.len() as u64) else { return false };
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
    true
}
