// SPDX-License-Identifier: Apache-2.0

//! Reads and writes GGUF model files: metadata, tensor table, and (for writing) tensor data.
//!
//! A GGUF file comes from the network, so this crate treats it as hostile input:
//!
//! 1. Every count and length is checked against the bytes that the file can still hold before
//!    anything is allocated.
//! 2. No input makes the crate panic, and memory stays below a small multiple of the bytes read.
//! 3. Errors name the key or tensor, and the byte offset.
//!
//! ```text
//! magic, version, counts | metadata (keys, values) | tensor table | padding | tensor data
//! '------------------------- Header ------------------------------'
//! ```
//!
//! - [`GgufModel::open`] opens one file or a whole split set. [`Header::read`] reads one file.
//! - [`Metadata::parse`] reads the metadata section alone, as a manifest carries it.
//! - [`check_model`] refuses metadata values that no engine can use, such as a layer without heads.
//! - [`TensorLayout`] and [`GgufWriter`] write a file as a stream.
//!
//! # Example
//!
//! ```
//! use gguf::{GgufWriter, Header, MetadataBuilder, TensorLayout};
//! use quant::DType;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut metadata = MetadataBuilder::default();
//! metadata.put("general.architecture", "llama")?;
//! metadata.put("llama.block_count", 1_u32)?;
//! let mut layout = TensorLayout::default();
//! layout.add("output_norm.weight", DType::F32, &[4])?;
//!
//! let mut writer = GgufWriter::start(Vec::new(), &metadata, layout)?;
//! writer.write(&[0; 16])?; // four f32 values
//! let file = writer.finish()?;
//!
//! let header = Header::read(&file[..], file.len() as u64)?;
//! assert_eq!(header.metadata().architecture()?, "llama");
//! assert_eq!(header.metadata().require::<u32>("llama.block_count")?, 1);
//! let tensor = header.tensor("output_norm.weight").ok_or("no such tensor")?;
//! assert_eq!((tensor.dtype, tensor.bytes), (DType::F32, 16));
//! assert_eq!(header.file_offset(tensor) % 32, 0);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod cursor;
mod header;
mod limits;
mod metadata;
mod model_check;
mod split;
mod tensor;
mod value;
mod write_error;
mod write_metadata;
mod writer;

pub use cursor::HeaderReadError;
pub use header::{Header, HeaderError};
pub use limits::*;
pub use metadata::{KeyError, Metadata, MetadataError};
pub use model_check::{ModelCheckError, check_model};
pub use split::{GgufFile, GgufModel, OpenError, SplitName};
pub use tensor::{TensorInfo, TensorInfoError};
pub use value::{Array, FromValue, StringArray, Value, ValueType};
pub use write_error::WriteError;
pub use write_metadata::{MetadataBuilder, ToValue};
pub use writer::{GgufWriter, TensorLayout};
