//! GGUF files: bytes to metadata and tensor table, and back.
//!
//! The whole header is checked before anyone allocates from it: every count and length is held against what the file
//! can contain, and errors name key, tensor and byte offset. Files are hostile input: nothing here panics on one, and
//! memory stays below a small multiple of the bytes read.
//!
//! [`Header::read`] takes one file, [`GgufModel::open`] a file or a whole split set, [`Metadata::parse`] the key-value section
//! alone, as it travels in a manifest. [`check_model`] holds well-known keys against what engines can stand.
//! [`TensorLayout`] and [`GgufWriter`] write files as a stream.

#![forbid(unsafe_code)]

mod cursor;
mod header;
mod limits;
mod metadata;
mod model_check;
mod split;
mod tensor;
mod value;
mod write_metadata;
mod writer;

pub use cursor::ReadError;
pub use header::{Header, HeaderError};
pub use limits::*;
pub use metadata::{KeyError, Metadata, MetadataError};
pub use model_check::{ModelCheckError, check_model};
pub use split::{GgufFile, GgufModel, OpenError, SplitName};
pub use tensor::{TensorInfo, TensorInfoError};
pub use value::{Array, FromValue, StringArray, Value, ValueType};
pub use write_metadata::{MetadataBuilder, ToValue};
pub use writer::{GgufWriter, TensorLayout, WriteError};
