// SPDX-License-Identifier: Apache-2.0

//! Reads the header of a model file without loading the model.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use gguf::{GgufFile, GgufModel, OpenError};
use models::{ModelDescription, TensorHead};
use service::Exit;
use service::exit::{exit_for_io_error, one_line};
use text::Tokenizer;

use crate::cli_error::{CliError, CliResult, IoContext, with_remedy};

/// Reads and checks the headers of a model's files, but no tensor data.
pub(crate) fn open(path: &Path) -> CliResult<GgufModel> {
    GgufModel::open(path).map_err(|error| {
        let exit = match &error {
            // A limit of this process is not the file's fault.
            OpenError::Io { source, .. } if exit_for_io_error(source) == Exit::OutOfResources => {
                Exit::OutOfResources
            }
            _ => Exit::ModelRefused,
        };
        CliError::new(exit, with_remedy(&error))
    })
}

/// Identifies the files of the model and their versions, under whatever paths.
pub(crate) fn identity(model: &GgufModel) -> CliResult<String> {
    let identity = |file: &GgufFile| {
        let metadata = std::fs::metadata(&file.path)
            .with_context(|| format!("cannot inspect {}", file.path.display()))?;
        let (device, inode, bytes) = (metadata.dev(), metadata.ino(), metadata.size());
        let (seconds, nanoseconds) = (metadata.mtime(), metadata.mtime_nsec());
        Ok(format!("{device}:{inode}:{bytes}:{seconds}.{nanoseconds:09}"))
    };
    Ok(model.files().iter().map(identity).collect::<CliResult<Vec<String>>>()?.join(" "))
}

fn refused(path: &Path, error: &dyn std::error::Error) -> CliError {
    CliError::new(Exit::ModelRefused, format!("{}: {}", path.display(), one_line(error)))
}

/// Checks that this executable can run the model, and describes the model.
pub(crate) fn describe(path: &Path, model: &GgufModel) -> CliResult<ModelDescription> {
    let heads = model.tensors().map(|(_, tensor)| TensorHead {
        name: &tensor.name,
        dtype: tensor.dtype,
        dims: &tensor.dims,
    });
    models::validate(model.metadata(), heads).map_err(|error| refused(path, &error))
}

pub(crate) fn tokenizer(path: &Path, model: &GgufModel) -> CliResult<Tokenizer> {
    Tokenizer::from_metadata(model.metadata()).map_err(|error| refused(path, &error))
}
