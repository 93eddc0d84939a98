// SPDX-License-Identifier: Apache-2.0

//! [`TensorLayout`] assigns offsets to tensors; [`GgufWriter`] streams the file. The model is never
//! in memory as a whole.

use crate::limits::{DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_TENSOR_NAME_BYTES, MAX_TENSORS};
use crate::tensor::{TensorInfo, tensor_bytes};
use crate::write_error::WriteError;
use crate::write_metadata::{MetadataBuilder, string};
use quant::DType;
use std::collections::HashSet;
use std::io::Write;

/// GGUF version of the files that are written.
const VERSION: u32 = 3;

/// Tensors with their offsets, in the order in which their data will be written.
#[derive(Clone, Debug, Default)]
pub struct TensorLayout {
    tensors: Vec<TensorInfo>,
    names: HashSet<String>,
    /// End of the last tensor, padded to the alignment.
    end: u64,
}

impl TensorLayout {
    /// Appends a tensor. `dims[0]` is the row length.
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

/// Writes a file: first the header, then tensor data in chunks of any size. It inserts the padding
/// between tensors.
pub struct GgufWriter<W> {
    out: W,
    layout: TensorLayout,
    /// Index of the tensor being written, and how many of its bytes are written.
    current: usize,
    current_bytes: u64,
}

impl<W: Write> GgufWriter<W> {
    /// Writes the header, which includes the tensor table.
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

    /// Writes the next bytes of tensor data. A chunk may end inside a tensor or continue into the
    /// next one.
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

    /// Finishes the file. Fails if tensor data is missing.
    pub fn finish(mut self) -> Result<W, WriteError> {
        self.pad_if_complete()?;
        if let Some(tensor) = self.layout.tensors.get(self.current) {
            let written = tensor.offset + self.current_bytes;
            return Err(WriteError::TooLittleData { written, expected: self.layout.end });
        }
        self.out.flush()?;
        Ok(self.out)
    }

    /// If the current tensor is complete, pads it and moves to the next tensor that still needs
    /// bytes.
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
