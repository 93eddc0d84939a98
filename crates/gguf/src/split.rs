// SPDX-License-Identifier: Apache-2.0

//! [`GgufModel`]: a model of one file or of a split set (`NAME-00001-of-00003.gguf`), opened and
//! checked as one.

use crate::header::{Header, HeaderError};
use crate::limits::MAX_SPLIT_FILES;
use crate::metadata::{KeyError, Metadata};
use crate::tensor::TensorInfo;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot open {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} is not a valid model file", path.display())]
    Header { path: PathBuf, source: HeaderError },
    #[error("{}: split metadata", path.display())]
    SplitKey { path: PathBuf, source: KeyError },
    #[error("{} is one of {count} files of a split model, but its name is not NAME-00001-of-{count:05}.gguf", path.display())]
    SplitName { path: PathBuf, count: u32 },
    #[error("{} is part {} of a split model; open the first part, {}", path.display(), number, first.display())]
    NotFirst { path: PathBuf, number: u32, first: PathBuf },
    #[error("{} claims to be split into {count} files; the limit is {MAX_SPLIT_FILES}", path.display())]
    SplitCount { path: PathBuf, count: u32 },
    #[error("{} has split.no {found}, but its name says {expected}", path.display())]
    SplitNumber { path: PathBuf, expected: u32, found: u32 },
    #[error("{} has split.count {found}, but the first file has {expected}", path.display())]
    SplitCountDiffers { path: PathBuf, expected: u32, found: u32 },
    #[error("tensor {name} is both in {} and in {}", first.display(), second.display())]
    DuplicateTensor { name: String, first: PathBuf, second: PathBuf },
    #[error("the files contain {found} tensors, but split.tensors.count in {} is {expected}", path.display())]
    TensorCount { path: PathBuf, expected: u64, found: u64 },
}

/// The parts of a split file's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitName {
    /// The part before `-00001-of-00003.gguf`.
    pub prefix: String,
    /// From 1.
    pub number: u32,
    pub count: u32,
}

/// The files of a model with their headers. There is at least one; the first holds the model's
/// metadata.
#[derive(Clone, Debug)]
pub struct GgufModel {
    files: Vec<GgufFile>,
}

/// One file of a model.
#[derive(Clone, Debug)]
pub struct GgufFile {
    pub path: PathBuf,
    pub header: Header,
}

impl SplitName {
    /// Parses a file name. Returns `None` if it is not the name of a split file.
    pub fn parse(name: &str) -> Option<Self> {
        let stem = name.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let plain = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            plain.then(|| text.parse::<u32>().ok()).flatten()
        };
        let (number, count) = (digits(number)?, digits(count)?);
        (1..=count).contains(&number).then(|| Self { prefix: prefix.into(), number, count })
    }

    /// Name of another file of the set.
    pub fn sibling(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count)
    }
}

impl GgufModel {
    /// Reads the headers of a model's files. `path` is the only file or the first of a split set.
    /// The files are closed again.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, |path| {
            // To open a FIFO would wait for a writer.
            if !std::fs::metadata(path)?.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
            }
            let file = File::open(path)?;
            let len = file.metadata()?.len();
            Ok((file, len))
        })
    }

    /// Like [`Self::open`], but `open` opens each file and returns it with its length, so that a
    /// caller can keep the files.
    pub fn open_with<R: Read>(
        path: &Path,
        mut open: impl FnMut(&Path) -> io::Result<(R, u64)>,
    ) -> Result<Self, OpenError> {
        let mut read = |path: PathBuf| {
            let (file, len) = open(&path).map_err(|source| OpenError::Io { path: path.clone(), source })?;
            match Header::read(file, len) {
                Ok(header) => Ok(GgufFile { path, header }),
                Err(source) => Err(OpenError::Header { path, source }),
            }
        };
        let first = read(path.to_owned())?;
        let count = split_key(&first, "split.count")?.unwrap_or(1);
        if count <= 1 {
            return Ok(Self { files: vec![first] });
        }
        let siblings = sibling_paths(&first, count)?;
        let mut files = vec![first];
        for path in siblings {
            files.push(read(path)?);
        }
        check_set(&files, count)?;
        Ok(Self { files })
    }

    pub fn files(&self) -> &[GgufFile] {
        &self.files
    }

    /// Metadata of the model: that of its first file.
    pub fn metadata(&self) -> &Metadata {
        self.files[0].header.metadata()
    }

    /// Tensors of all files in order, each with the index of its file.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, &TensorInfo)> {
        let numbered = self.files.iter().enumerate();
        numbered.flat_map(|(file, part)| part.header.tensors().iter().map(move |tensor| (file, tensor)))
    }

    /// Finds a tensor by name; returns it with the index of its file.
    pub fn tensor(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        let mut numbered = self.files.iter().enumerate();
        numbered.find_map(|(file, part)| part.header.tensor(name).map(|tensor| (file, tensor)))
    }

    /// Total bytes of all tensors, without padding.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors().map(|(_, tensor)| tensor.bytes).sum()
    }
}

fn split_key(file: &GgufFile, key: &str) -> Result<Option<u32>, OpenError> {
    let value = file.header.metadata().get(key);
    value.map_err(|source| OpenError::SplitKey { path: file.path.clone(), source })
}

/// Paths of files 2 to `count`, derived from the name of the first.
fn sibling_paths(first: &GgufFile, count: u32) -> Result<Vec<PathBuf>, OpenError> {
    let path = &first.path;
    if count > MAX_SPLIT_FILES {
        return Err(OpenError::SplitCount { path: path.clone(), count });
    }
    let name = path.file_name().and_then(|name| name.to_str()).and_then(SplitName::parse);
    let Some(name) = name.filter(|name| name.count == count) else {
        return Err(OpenError::SplitName { path: path.clone(), count });
    };
    if name.number != 1 {
        let first = path.with_file_name(name.sibling(1));
        return Err(OpenError::NotFirst { path: path.clone(), number: name.number, first });
    }
    Ok((2..=count).map(|number| path.with_file_name(name.sibling(number))).collect())
}

/// Checks that the files belong together: split numbers, counts, and unique tensor names.
fn check_set(files: &[GgufFile], count: u32) -> Result<(), OpenError> {
    let mut owners = HashMap::new();
    for (file, expected) in files.iter().zip(0..) {
        let path = || file.path.clone();
        let required = |key| -> Result<u32, OpenError> {
            let value = file.header.metadata().require(key);
            value.map_err(|source| OpenError::SplitKey { path: path(), source })
        };
        let found = required("split.no")?;
        if found != expected {
            return Err(OpenError::SplitNumber { path: path(), expected, found });
        }
        let found = required("split.count")?;
        if found != count {
            return Err(OpenError::SplitCountDiffers { path: path(), expected: count, found });
        }
        for tensor in file.header.tensors() {
            if let Some(first) = owners.insert(tensor.name.as_str(), &file.path) {
                let name = tensor.name.clone();
                return Err(OpenError::DuplicateTensor { name, first: first.clone(), second: path() });
            }
        }
    }
    let first = &files[0];
    let expected = first.header.metadata().require::<u64>("split.tensors.count");
    let expected = expected.map_err(|source| OpenError::SplitKey { path: first.path.clone(), source })?;
    let found = owners.len() as u64;
    if found != expected {
        return Err(OpenError::TensorCount { path: first.path.clone(), expected, found });
    }
    Ok(())
}
