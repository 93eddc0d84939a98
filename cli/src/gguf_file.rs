//! What can be read from the head of a model file, without loading it.

use std::path::Path;

use gguf::Model;
use models::{ModelDescription, TensorHead};
use service::Exit;
use service::exit::one_line;
use text::Tokenizer;

use crate::failure::{Failure, Outcome};

/// Opens a model and checks its header; tensor data is not touched.
pub(crate) fn open(path: &Path) -> Outcome<Model> {
    Model::open(path).map_err(|error| Failure::new(Exit::ModelRefused, one_line(&error)))
}

fn refused(path: &Path, error: &dyn std::error::Error) -> Failure {
    Failure::new(Exit::ModelRefused, format!("{}: {}", path.display(), one_line(error)))
}

/// Checks that this executable can run the model, and tells its shape.
pub(crate) fn describe(path: &Path, model: &Model) -> Outcome<ModelDescription> {
    let heads = model.tensors().map(|(_, tensor)| TensorHead {
        name: &tensor.name,
        dtype: tensor.dtype,
        dims: &tensor.dims,
    });
    models::validate(model.metadata(), heads).map_err(|error| refused(path, &error))
}

pub(crate) fn tokenizer(path: &Path, model: &Model) -> Outcome<Tokenizer> {
    Tokenizer::from_metadata(model.metadata()).map_err(|error| refused(path, &error))
}
