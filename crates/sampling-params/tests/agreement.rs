// SPDX-License-Identifier: Apache-2.0

//! Compares the table with `ballast.v1.Sampling` and with `docs/SAMPLING.md`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Write;
use std::path::Path;

use prost::Message;
use prost_types::FileDescriptorSet;
use prost_types::field_descriptor_proto::{Label, Type};
use sampling_params::{PARAMETERS, ParameterType};

/// Set this variable to write `docs/SAMPLING.md` instead of comparing it.
const WRITE: &str = "WRITE_SAMPLING_DOC";

#[test]
fn the_protobuf_message_has_the_parameters_in_this_order() {
    let files = FileDescriptorSet::decode(proto::FILE_DESCRIPTOR_SET).unwrap().file;
    let message = files
        .iter()
        .filter(|file| file.package() == "ballast.v1")
        .flat_map(|file| &file.message_type)
        .find(|message| message.name() == "Sampling")
        .expect("ballast.v1.Sampling");
    let mut fields: Vec<_> = message.field.iter().collect();
    fields.sort_by_key(|field| field.number());
    let described: Vec<_> =
        fields.iter().map(|field| (field.number(), field.name(), (field.r#type(), field.label()))).collect();
    let expected: Vec<_> = (1..)
        .zip(PARAMETERS)
        .map(|(number, parameter)| (number, parameter.name(), wire_type(parameter.value_type())))
        .collect();
    assert_eq!(described, expected);
}

fn wire_type(value_type: ParameterType) -> (Type, Label) {
    match value_type {
        ParameterType::Float => (Type::Float, Label::Optional),
        ParameterType::Uint32 => (Type::Uint32, Label::Optional),
        ParameterType::Uint64 => (Type::Uint64, Label::Optional),
        ParameterType::Strings => (Type::Message, Label::Optional),
        // A map field is a repeated message of entries.
        ParameterType::FloatByToken => (Type::Message, Label::Repeated),
    }
}

#[test]
fn the_documentation_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/SAMPLING.md");
    let expected = documentation();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "docs/SAMPLING.md differs from the table: run {WRITE}=1 cargo test -p sampling-params"
    );
}

fn documentation() -> String {
    let mut text = String::from(
        "# Sampling parameters\n\n\
         Generated from `crates/sampling-params/src/table.rs`. To write this file again, run\n\
         `WRITE_SAMPLING_DOC=1 cargo test -p sampling-params`.\n\n\
         Each name is a field of the HTTP requests and of `ballast.v1.Sampling`, with the number in the\n\
         first column. A value out of range is refused with an error that names the field and its range.\n\n\
         | no. | parameter | type | allowed | default | meaning |\n|---|---|---|---|---|---|\n",
    );
    for (number, parameter) in (1..).zip(PARAMETERS) {
        let value_type = match parameter.value_type() {
            ParameterType::Float => "float",
            ParameterType::Uint32 => "integer",
            ParameterType::Uint64 => "64-bit integer",
            ParameterType::Strings => "strings",
            ParameterType::FloatByToken => "map of token id to float",
        };
        writeln!(
            text,
            "| {number} | `{}` | {value_type} | {} | {} | {} |",
            parameter.name(),
            parameter.allowed(),
            parameter.default(),
            parameter.meaning(),
        )
        .unwrap();
    }
    text
}
