// SPDX-License-Identifier: Apache-2.0

//! `ballast inspect`: prints the contents of a model file's header.

use gguf::{Array, GgufModel, Value, check_model};
use serde::Serialize;
use serde_json::{Map, Value as Json, json};
use service::exit::one_line;
use service::printable::printable;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use weight_server::{CheckedText, TextCheckError};

use crate::cli_error::CliResult;
use crate::gguf_file;

/// Arrays up to this length are printed whole. Longer ones, such as vocabularies, are abbreviated.
const WHOLE_ARRAY: usize = 64;
const ARRAY_START: usize = 4;
/// Most characters of one printed value.
const LINE_CHARS: usize = 90;

/// Print metadata, tensors and sizes of a model file
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArguments {
    /// GGUF file, or the first file of a split set
    pub(crate) model: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The printed report. The field names are those of the JSON output.
#[derive(Debug, Serialize)]
pub(crate) struct InspectReport {
    files: Vec<FileRow>,
    architecture: Option<String>,
    /// Why no engine can use the model, although its files are valid.
    refused: Option<String>,
    /// If false, the model takes and gives token ids only.
    tokenizer: bool,
    /// Why chats are refused.
    chat_problem: Option<String>,
    parameters: u64,
    tensor_bytes: u64,
    types: Vec<TypeRow>,
    /// Long arrays are abbreviated as `{"array_of", "length", "start"}`.
    metadata: Map<String, Json>,
    tensors: Vec<TensorRow>,
}

#[derive(Debug, Serialize)]
struct FileRow {
    path: PathBuf,
    bytes: u64,
    version: u32,
    alignment: u32,
    header_bytes: usize,
    data_start: u64,
}

#[derive(Debug, Serialize)]
struct TypeRow {
    #[serde(rename = "type")]
    dtype: &'static str,
    tensors: usize,
    parameters: u64,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct TensorRow {
    name: String,
    #[serde(rename = "type")]
    dtype: &'static str,
    dims: Vec<u64>,
    /// Index into `files`.
    file: usize,
    /// Offset from the start of that file.
    offset: u64,
    bytes: u64,
}

/// `text` is the result of the check of tokenizer and chat template.
pub(crate) fn inspect(path: &Path, text: Result<CheckedText, TextCheckError>) -> CliResult<InspectReport> {
    let model = gguf_file::open(path)?;
    let refused = check_model(model.metadata()).err().map(|error| error.to_string());
    let (tokenizer, chat_problem, refused_text) = match text {
        Ok(text) => (text.has_tokenizer, text.chat_problem, None),
        Err(error) => (false, String::new(), Some(one_line(&error))),
    };
    let files = model.files().iter().map(|file| FileRow {
        path: file.path.clone(),
        bytes: file.header.file_len(),
        version: file.header.version(),
        alignment: file.header.alignment(),
        header_bytes: file.header.bytes().len(),
        data_start: file.header.data_start(),
    });
    let tensors = model.tensors().map(|(file, tensor)| TensorRow {
        name: tensor.name.clone(),
        dtype: tensor.dtype.name(),
        dims: tensor.dims.clone(),
        file,
        offset: model.files()[file].header.file_offset(tensor),
        bytes: tensor.bytes,
    });
    let metadata = model.metadata().iter().map(|(key, value)| (key.to_owned(), to_json(value)));
    Ok(InspectReport {
        files: files.collect(),
        architecture: model.metadata().architecture().ok().map(str::to_owned),
        refused: refused.or(refused_text),
        tokenizer,
        chat_problem: Some(chat_problem).filter(|problem| !problem.is_empty()),
        parameters: model.tensors().map(|(_, tensor)| tensor.values()).sum(),
        tensor_bytes: model.tensor_bytes(),
        types: types(&model),
        metadata: metadata.collect(),
        tensors: tensors.collect(),
    })
}

/// Totals for each tensor type, the largest first.
fn types(model: &GgufModel) -> Vec<TypeRow> {
    let mut by_type = BTreeMap::new();
    for (_, tensor) in model.tensors() {
        let dtype = tensor.dtype.name();
        let row =
            by_type.entry(tensor.dtype).or_insert(TypeRow { dtype, tensors: 0, parameters: 0, bytes: 0 });
        row.tensors += 1;
        row.parameters += tensor.values();
        row.bytes += tensor.bytes;
    }
    let mut rows: Vec<_> = by_type.into_values().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    rows
}

fn to_json(value: Value<'_>) -> Json {
    match value {
        Value::U8(value) => value.into(),
        Value::I8(value) => value.into(),
        Value::U16(value) => value.into(),
        Value::I16(value) => value.into(),
        Value::U32(value) => value.into(),
        Value::I32(value) => value.into(),
        Value::U64(value) => value.into(),
        Value::I64(value) => value.into(),
        Value::F32(value) => float(value.to_string(), value.into()),
        Value::F64(value) => float(value.to_string(), value),
        Value::Bool(value) => value.into(),
        Value::String(bytes) => String::from_utf8_lossy(bytes).into(),
        Value::Array(array) => array_to_json(array),
    }
}

/// Prints the shortest digits that parse to the stored number (1e-6 instead of
/// 9.999999974752427e-7). Inf and NaN become text.
fn float(digits: String, value: f64) -> Json {
    match digits.parse::<f64>() {
        Ok(shortest) if value.is_finite() => shortest.into(),
        _ => digits.into(),
    }
}

fn array_to_json(array: Array<'_>) -> Json {
    if array.len <= WHOLE_ARRAY {
        return array.iter().map(to_json).collect();
    }
    let start: Vec<Json> = array.iter().take(ARRAY_START).map(to_json).collect();
    json!({ "array_of": array.element.to_string(), "length": array.len, "start": start })
}

impl InspectReport {
    /// Why no engine can use the model.
    pub(crate) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }
}

impl fmt::Display for InspectReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            let FileRow { path, bytes, version, alignment, data_start, .. } = file;
            writeln!(f, "{}", printable(&path.to_string_lossy()))?;
            writeln!(
                f,
                "  GGUF version {version}, {bytes} bytes, data from byte {data_start}, alignment {alignment}"
            )?;
        }
        let architecture = self.architecture.as_deref().unwrap_or("none");
        let billions = self.parameters as f64 / 1e9;
        writeln!(
            f,
            "\narchitecture {}, {billions:.3} billion parameters in {} bytes",
            printable(architecture),
            self.tensor_bytes
        )?;
        if let Some(reason) = &self.refused {
            writeln!(f, "this model would be refused: {}", printable(reason))?;
        }
        if let Some(problem) = &self.chat_problem {
            writeln!(f, "chats would be refused: {}", printable(problem))?;
        }
        writeln!(f, "\n{:<10}{:>8}{:>18}{:>18}{:>8}", "type", "tensors", "parameters", "bytes", "bits")?;
        for TypeRow { dtype, tensors, parameters, bytes } in &self.types {
            let bits = 8.0 * *bytes as f64 / (*parameters).max(1) as f64;
            writeln!(f, "{dtype:<10}{tensors:>8}{parameters:>18}{bytes:>18}{bits:>8.2}")?;
        }
        writeln!(f, "\nmetadata")?;
        for (key, value) in &self.metadata {
            writeln!(f, "  {} = {}", printable(key), shortened(value))?;
        }
        writeln!(f, "\n{:<40}{:<10}{:<26}{:>16}{:>16}", "tensor", "type", "dimensions", "offset", "bytes")?;
        for TensorRow { name, dtype, dims, offset, bytes, .. } in &self.tensors {
            let dims = dims.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
            let name = printable(name);
            writeln!(f, "{name:<40}{dtype:<10}{dims:<26}{offset:>16}{bytes:>16}")?;
        }
        Ok(())
    }
}

/// Formats a value on one line.
fn shortened(value: &Json) -> String {
    let text = match value {
        Json::Object(array) => {
            format!("{} of {}, from {}", array["length"], array["array_of"], array["start"])
        }
        value => value.to_string(),
    };
    let text = printable(&text);
    match text.char_indices().nth(LINE_CHARS) {
        None => text,
        Some((cut, _)) => format!("{}... ({} bytes)", &text[..cut], text.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gguf::{GgufWriter, MetadataBuilder, TensorLayout};
    use quant::DType;

    #[test]
    fn a_report_has_every_key_tensor_and_size() {
        let mut metadata = MetadataBuilder::default();
        metadata.put("general.architecture", "llama").unwrap();
        metadata.put("llama.block_count", 600_u32).unwrap();
        metadata.put("llama.attention.layer_norm_rms_epsilon", 1e-6_f32).unwrap();
        metadata.put("\u{1b}[2J.key", "\u{1b}]0;x\u{9b}").unwrap();
        metadata.put("llama.sections", &[1_i32, 2][..]).unwrap();
        metadata.put("tokenizer.ggml.scores", &[0.5_f32; 100][..]).unwrap();
        let mut layout = TensorLayout::default();
        layout.add("a", DType::Q8_0, &[32, 2]).unwrap();
        layout.add("b", DType::F32, &[4]).unwrap();
        let mut writer = GgufWriter::start(Vec::new(), &metadata, layout).unwrap();
        writer.write(&[0; 84]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        std::fs::write(&path, writer.finish().unwrap()).unwrap();

        let text = CheckedText { has_tokenizer: true, chat_problem: "no template".to_owned() };
        let report = inspect(&path, Ok(text)).unwrap();
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["parameters"], 68);
        assert_eq!(json["tensor_bytes"], 84);
        assert_eq!(json["types"][0], json!({"type": "Q8_0", "tensors": 1, "parameters": 64, "bytes": 68}));
        assert_eq!(json["metadata"]["llama.block_count"], 600);
        assert_eq!(json["metadata"]["llama.attention.layer_norm_rms_epsilon"], 1e-6);
        assert_eq!(json["metadata"]["llama.sections"], json!([1, 2]));
        let scores = json!({"array_of": "f32", "length": 100, "start": [0.5, 0.5, 0.5, 0.5]});
        assert_eq!(json["metadata"]["tokenizer.ggml.scores"], scores);
        let offset = json["files"][0]["data_start"].as_u64().unwrap() + 96;
        let row = json!({"name": "b", "type": "F32", "dims": [4], "file": 0, "offset": offset, "bytes": 16});
        assert_eq!(json["tensors"][1], row);
        let refused = "key llama.block_count is 600; the limit is 512";
        assert_eq!(json["refused"], refused);
        let text = report.to_string();
        let control = text.chars().find(|c| c.is_control() && *c != '\n');
        assert_eq!(control, None, "{text:?}");
        for part in [
            "  \\u{1b}[2J.key = \"\\u001b]0;x\\u{9b}\"\n",
            "m.gguf\n",
            refused,
            "chats would be refused: no template\n",
            "100 of \"f32\", from [0.5,",
            "  llama.block_count = 600\n",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
