// SPDX-License-Identifier: Apache-2.0

//! Split sets are found by file name, checked as a whole, and refused with the name of the wrong
//! file.

use gguf::{GgufModel, GgufWriter, MetadataBuilder, OpenError, SplitName, TensorLayout};
use quant::DType;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

/// A file of a split set with the given split keys and tensors of one value each.
fn shard(number: u16, count: u16, total: i32, tensors: &[&str]) -> Vec<u8> {
    let mut metadata = MetadataBuilder::default();
    if number == 0 {
        metadata.put("general.architecture", "llama").unwrap();
    }
    metadata.put("split.no", number).unwrap();
    metadata.put("split.count", count).unwrap();
    metadata.put("split.tensors.count", total).unwrap();
    let mut layout = TensorLayout::default();
    for name in tensors {
        layout.add(name, DType::F32, &[1]).unwrap();
    }
    let mut writer = GgufWriter::start(Vec::new(), &metadata, layout).unwrap();
    writer.write(&vec![0; 4 * tensors.len()]).unwrap();
    writer.finish().unwrap()
}

fn open(path: &str, files: &[(&str, Vec<u8>)]) -> Result<GgufModel, OpenError> {
    let files: HashMap<PathBuf, &[u8]> =
        files.iter().map(|(name, bytes)| (PathBuf::from("/m").join(name), &bytes[..])).collect();
    GgufModel::open_with(Path::new(path), |path| {
        let bytes = *files.get(path).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        Ok((bytes, bytes.len() as u64))
    })
}

const FIRST: &str = "m-00001-of-00003.gguf";
const SECOND: &str = "m-00002-of-00003.gguf";
const THIRD: &str = "m-00003-of-00003.gguf";

fn good() -> [(&'static str, Vec<u8>); 3] {
    [(FIRST, shard(0, 3, 3, &[])), (SECOND, shard(1, 3, 3, &["a", "b"])), (THIRD, shard(2, 3, 3, &["c"]))]
}

/// Opens a valid set with some files replaced and checks the error.
fn check(replaced: &[(&'static str, Vec<u8>)], expected: &str) {
    let mut files = good().to_vec();
    for (name, bytes) in replaced {
        files.retain(|(other, _)| other != name);
        files.push((name, bytes.clone()));
    }
    assert_eq!(open("/m/m-00001-of-00003.gguf", &files).unwrap_err().to_string(), expected);
}

#[test]
fn a_set_opens_from_its_first_file() {
    let model = open("/m/m-00001-of-00003.gguf", &good()).unwrap();
    let tensors: Vec<_> = model.tensors().map(|(file, tensor)| (file, tensor.name.as_str())).collect();
    assert_eq!(tensors, [(1, "a"), (1, "b"), (2, "c")]);
    assert_eq!(model.metadata().architecture(), Ok("llama"));
    assert_eq!(model.tensor("c").map(|(file, tensor)| (file, tensor.bytes)), Some((2, 4)));
    assert_eq!(model.tensor_bytes(), 12);
    assert_eq!(open("/m/x.gguf", &[("x.gguf", shard(0, 1, 1, &["a"]))]).unwrap().files().len(), 1);
}

#[test]
fn damaged_sets_are_refused_by_file() {
    let first = || shard(0, 3, 3, &[]);
    let opened = open("/m/m-00002-of-00003.gguf", &good()).unwrap_err();
    assert_eq!(
        opened.to_string(),
        "/m/m-00002-of-00003.gguf is part 2 of a split model; open the first part, /m/m-00001-of-00003.gguf"
    );
    let renamed = open("/m/model.gguf", &[("model.gguf", first())]).unwrap_err();
    assert_eq!(
        renamed.to_string(),
        "/m/model.gguf is one of 3 files of a split model, but its name is not NAME-00001-of-00003.gguf"
    );
    let missing = open("/m/m-00001-of-00003.gguf", &good()[..2]).unwrap_err();
    assert_eq!(missing.to_string(), "cannot open /m/m-00003-of-00003.gguf");
    check(&[(THIRD, first()[..30].to_vec())], "/m/m-00003-of-00003.gguf is not a valid model file");
    check(
        &[(SECOND, shard(2, 3, 3, &["a", "b"]))],
        "/m/m-00002-of-00003.gguf has split.no 2, but its name says 1",
    );
    check(
        &[(SECOND, shard(1, 4, 3, &["a", "b"]))],
        "/m/m-00002-of-00003.gguf has split.count 4, but the first file has 3",
    );
    check(
        &[(THIRD, shard(2, 3, 3, &["a"]))],
        "tensor a is both in /m/m-00002-of-00003.gguf and in /m/m-00003-of-00003.gguf",
    );
    check(
        &[(FIRST, shard(0, 3, 4, &[]))],
        "the files contain 3 tensors, but split.tensors.count in /m/m-00001-of-00003.gguf is 4",
    );
    let many = open("/m/m-00001-of-60000.gguf", &[("m-00001-of-60000.gguf", shard(0, 60_000, 3, &[]))]);
    assert_eq!(
        many.unwrap_err().to_string(),
        "/m/m-00001-of-60000.gguf claims to be split into 60000 files; the limit is 1024"
    );
}

#[test]
fn names_of_split_files_are_exact() {
    let name = SplitName::parse("qwen3-8b-00002-of-00004.gguf").unwrap();
    assert_eq!((name.prefix.as_str(), name.number, name.count), ("qwen3-8b", 2, 4));
    assert_eq!(name.sibling(3), "qwen3-8b-00003-of-00004.gguf");
    for other in
        ["a.gguf", "a-00005-of-00004.gguf", "a-00000-of-00004.gguf", "a-1-of-4.gguf", "a-+0001-of-00004.gguf"]
    {
        assert_eq!(SplitName::parse(other), None, "{other}");
    }
}
