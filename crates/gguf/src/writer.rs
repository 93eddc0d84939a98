//! [`TensorLayout`] places tensors, [`GgufWriter`] streams their data behind the header: a model is never in memory as a whole.

use crate::limits::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_TENSOR_NAME_BYTES, MAX_TENSORS};
use crate::tensor::{TensorInfo, TensorInfoError, tensor_bytes};
use crate::write_metadata::{MetadataBuilder, string};
use quant::DType;
use std::collections::HashSet;
use std::io::{self, Write};

/// The version written.
const VERSION: u32 = 3;

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("key \"{key}\" is empty, too long, or one too many")]
    Key { key: String },
    #[error(
        "{ALIGNMENT_KEY} cannot be chosen: files are written with the default of {DEFAULT_ALIGNMENT} bytes"
    )]
    Alignment,
    #[error("key {key} is put twice")]
    DuplicateKey { key: String },
    #[error("tensor name \"{name}\" is empty, too long, or one too many")]
    TensorName { name: String },
    #[error("tensor {name} is added twice")]
    DuplicateTensor { name: String },
    #[error("tensor {name} has {count} dimensions, and 1 to {MAX_DIMS} are possible")]
    Dims { name: String, count: usize },
    #[error(transparent)]
    Tensor(#[from] TensorInfoError),
    #[error("the tensors up to {name} have more bytes than 64 bits can count")]
    TotalBytes { name: String },
    #[error("the data goes on beyond the last tensor by {excess} bytes")]
    TooMuchData { excess: u64 },
    #[error("the data ends at byte {written} of {expected}")]
    TooLittleData { written: u64, expected: u64 },
    #[error("cannot write the file")]
    Io(#[from] io::Error),
}

/// Tensors in the order in which their data will be written.
#[derive(Clone, Debug, Default)]
pub struct TensorLayout {
    tensors: Vec<TensorInfo>,
    names: HashSet<String>,
    /// Padded end of the last tensor.
    end: u64,
}

impl TensorLayout {
    /// Places a tensor behind the last one. `dims[0]` is the row length.
    pub fn add(&mut self, name: &str, dtype: DType, dims: &[u64]) -> Result<(), WriteError> {
        let valid = !name.is_empty() && name.len() as u64 <= MAX_TENSOR_NAME_BYTES;
        if !valid || self.tensors.len() as u64 >= MAX_TENSORS {
            return Err(WriteError::TensorName { name: name.into() });
        }
        if dims.is_empty() || dims.len() > MAX_DIMS as usize {
            return Err(WriteError::Dims { name: name.into(), count: dims.len() });
        }
        let bytes = tensor_bytes(name, dtype, dims)?;
        let end = self.end.checked_add(bytes);
        let end = end.and_then(|end| end.checked_next_multiple_of(DEFAULT_ALIGNMENT.into()));
        let Some(end) = end else { return Err(WriteError::TotalBytes { name: name.into() }) };
        if !self.names.insert(name.into()) {
            return Err(WriteError::DuplicateTensor { name: name.into() });
        }
        self.tensors.push(TensorInfo {
            name: name.into(),
            dtype,
            dims: dims.to_vec(),
            offset: self.end,
            bytes,
        });
        self.end = end;
        Ok(())
    }

    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }
}

/// Takes the data of a layout's tensors in order, in pieces of any size, and puts the padding between them.
pub struct GgufWriter<W> {
    out: W,
    layout: TensorLayout,
    /// The tensor that is being written, and how much of it has been.
    current: usize,
    current_bytes: u64,
}

impl<W: Write> GgufWriter<W> {
    /// Writes the header.
    pub fn start(mut out: W, metadata: &MetadataBuilder, layout: TensorLayout) -> Result<Self, WriteError> {
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((layout.tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        header.extend(metadata.bytes());
        for tensor in &layout.tensors {
            string(tensor.name.as_bytes(), &mut header);
            header.extend((tensor.dims.len() as u32).to_le_bytes());
            header.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            header.extend(tensor.dtype.id().to_le_bytes());
            header.extend(tensor.offset.to_le_bytes());
        }
        header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
        out.write_all(&header)?;
        Ok(Self { out, layout, current: 0, current_bytes: 0 })
    }

    /// Takes the next bytes of tensor data. A piece may end inside a tensor or run on into the next.
    pub fn write(&mut self, mut data: &[u8]) -> Result<(), WriteError> {
        while !data.is_empty() {
            let Some(tensor) = self.layout.tensors.get(self.current) else {
                return Err(WriteError::TooMuchData { excess: data.len() as u64 });
            };
            let open = tensor.bytes - self.current_bytes;
            let (now, rest) = data.split_at(open.min(data.len() as u64) as usize);
            self.out.write_all(now)?;
            self.current_bytes += now.len() as u64;
            data = rest;
            self.pad_if_complete()?;
        }
        Ok(())
    }

    /// Ends the file, which must be complete.
    pub fn finish(mut self) -> Result<W, WriteError> {
        self.pad_if_complete()?;
        if let Some(tensor) = self.layout.tensors.get(self.current) {
            let written = tensor.offset + self.current_bytes;
            return Err(WriteError::TooLittleData { written, expected: self.layout.end });
        }
        self.out.flush()?;
        Ok(self.out)
    }

    /// Steps to the next tensor that has bytes to come.
    fn pad_if_complete(&mut self) -> Result<(), WriteError> {
        while let Some(tensor) = self.layout.tensors.get(self.current) {
            if self.current_bytes < tensor.bytes {
                break;
            }
            let padding = tensor.bytes.next_multiple_of(DEFAULT_ALIGNMENT.into()) - tensor.bytes;
            self.out.write_all(&[0; DEFAULT_ALIGNMENT as usize][..padding as usize])?;
            self.current += 1;
            self.current_bytes = 0;
        }
        Ok(())
    }
}
