// SPDX-License-Identifier: Apache-2.0

//! Reads the header of a model file without loading the model.

use std::path::Path;

use gguf::GgufModel;
use models::{ModelDescription, TensorHead};
use service::Exit;
use service::exit::one_line;
use text::Tokenizer;

use crate::cli_error::{CliError, CliResult};

/// Reads and checks the headers of a model's files, but no tensor data.
pub(crate) fn open(path: &Path) -> CliResult<GgufModel> {
    GgufModel::open(path).map_err(|error| CliError::new(Exit::ModelRefused, one_line(&error)))
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
