// SPDX-License-Identifier: Apache-2.0

//! [`ModelFile`]: a GGUF file in memory, for tests with small models.

use crate::{ModelDescription, TensorHead, WeightTable};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use gguf::{Header, TensorInfo};
use ops::{Backend, Weight};
use quant::DType;
use std::path::Path;

#[derive(Clone, Debug)]
pub struct ModelFile {
    bytes: Bytes,
    header: Header,
}

impl ModelFile {
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = Bytes::from(std::fs::read(path).with_context(|| path.display().to_string())?);
        let header = Header::read(&bytes[..], bytes.len() as u64)?;
        Ok(Self { bytes, header })
    }

    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        let header = Header::read(&bytes[..], bytes.len() as u64)?;
        Ok(Self { bytes: bytes.into(), header })
    }

    /// The data of one of the header's tensors.
    pub fn tensor_bytes(&self, tensor: &TensorInfo) -> Result<&[u8]> {
        let start = self.header.file_offset(tensor) as usize;
        let data = self.bytes.get(start..start + tensor.bytes as usize);
        data.with_context(|| format!("tensor {} is cut off", tensor.name))
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn description(&self) -> Result<ModelDescription> {
        Ok(crate::validate(self.header.metadata(), self.heads())?)
    }

    pub fn weights<B: Backend<Data: From<Bytes>>>(&self) -> Result<WeightTable<B>> {
        let mut table = WeightTable::new();
        for tensor in self.header.tensors() {
            let start = self.header.file_offset(tensor) as usize;
            let end = start + tensor.bytes as usize;
            ensure!(end <= self.bytes.len(), "tensor {} is cut off", tensor.name);
            let weight = Weight {
                dtype: tensor.dtype,
                dims: tensor.dims.iter().map(|&dim| dim as usize).collect(),
                layout: 0,
                data: self.bytes.slice(start..end).into(),
            };
            table.insert(tensor.name.clone(), weight)?;
        }
        Ok(table)
    }

    /// Whether activations are rounded before they meet some of the weights. Only F32 weights take
    /// them as they are.
    pub fn rounds_activations(&self) -> bool {
        self.header.tensors().iter().any(|tensor| tensor.dtype != DType::F32)
    }

    fn heads(&self) -> impl Iterator<Item = TensorHead<'_>> {
        let tensors = self.header.tensors().iter();
        tensors.map(|tensor| TensorHead { name: &tensor.name, dtype: tensor.dtype, dims: &tensor.dims })
    }
}
