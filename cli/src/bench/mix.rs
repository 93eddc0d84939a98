// SPDX-License-Identifier: Apache-2.0

//! The arguments of `ballast bench serve` that say what requests ask for.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use loadgen::serving::{MixKind, RandomLengths, TokenScale, read_sharegpt};
use serde_json::{Map, Value, json};
use service::Exit;
use service::exit::one_line;

use crate::cli_error::{CliError, CliResult, IoContext};

/// ShareGPT itself has 642 MiB.
const DATASET_BYTES_MAX: u64 = 2 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum DatasetName {
    /// Random words; lengths around --input-len and --output-len
    Random,
    /// Prompts of a file in ShareGPT's form, or random words of similar lengths
    Sharegpt,
    /// Conversations that send their history again with each turn
    MultiTurn,
}

impl DatasetName {
    fn text(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Sharegpt => "sharegpt",
            Self::MultiTurn => "multi-turn",
        }
    }
}

#[derive(clap::Args)]
pub(super) struct MixArguments {
    #[arg(long, value_enum, default_value_t = DatasetName::Random)]
    dataset_name: DatasetName,
    /// File in ShareGPT's JSON form
    #[arg(long, value_name = "FILE.json")]
    dataset_path: Option<PathBuf>,
    /// Prompt tokens of a request, or of each turn [default: 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    input_len: Option<u32>,
    /// Output tokens [default: 128; with sharegpt, as in the data]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    output_len: Option<u32>,
    /// Lengths are uniform within 1 ± RATIO of their mean
    #[arg(long, value_name = "RATIO", default_value_t = 0.0)]
    range_ratio: f64,
    /// Tokens before each prompt that all prompts share
    #[arg(long, value_name = "N", default_value_t = 0)]
    prefix_len: u32,
    /// Turns of a conversation (multi-turn)
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Mean time between an answer and the next turn (multi-turn)
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = service::duration::parse)]
    think_time: Duration,
}

impl MixArguments {
    pub(super) fn check(&self) -> CliResult {
        let is_file_mix = self.dataset_name == DatasetName::Sharegpt;
        let text = if !(0.0..1.0).contains(&self.range_ratio) {
            "--range-ratio is from 0 up to, and not including, 1"
        } else if self.dataset_path.is_some() && !is_file_mix {
            "--dataset-path needs --dataset-name sharegpt"
        } else if is_file_mix && self.input_len.is_some() {
            "--input-len is not for sharegpt: its prompts have the lengths of the data"
        } else {
            return Ok(());
        };
        Err(CliError::new(Exit::Usage, text))
    }

    fn lengths(&self) -> RandomLengths {
        RandomLengths {
            input_tokens: self.input_len.unwrap_or(256),
            output_tokens: self.output_len.unwrap_or(128),
            range_ratio: self.range_ratio,
            prefix_tokens: self.prefix_len,
        }
    }

    pub(super) fn kind(
        &self,
        scale: &TokenScale,
        context_tokens: Option<u32>,
        seed: u64,
    ) -> CliResult<MixKind> {
        let output_tokens = self.output_len;
        Ok(match (self.dataset_name, &self.dataset_path) {
            (DatasetName::Random, _) => MixKind::Random(self.lengths()),
            (DatasetName::MultiTurn, _) => MixKind::MultiTurn {
                lengths: self.lengths(),
                turns: self.turns,
                mean_think_time: self.think_time,
            },
            (DatasetName::Sharegpt, None) => MixKind::ShareGptLike { output_tokens },
            (DatasetName::Sharegpt, Some(file)) => {
                let json = read_dataset(file).with_context(|| format!("cannot read {}", file.display()))?;
                let pairs = read_sharegpt(&json, scale, context_tokens, seed).map_err(|error| {
                    let text = format!("{} gives no prompts: {}", file.display(), one_line(&error));
                    CliError::new(Exit::Usage, text)
                })?;
                MixKind::ShareGptFile { pairs, output_tokens }
            }
        })
    }

    /// Requests of a conversation.
    pub(super) fn turns(&self) -> u64 {
        if self.dataset_name == DatasetName::MultiTurn { u64::from(self.turns) } else { 1 }
    }

    /// What a result says of the mix.
    pub(super) fn description(&self) -> Map<String, Value> {
        let lengths = self.lengths();
        let mut fields = Map::from_iter([("dataset_name".to_owned(), json!(self.dataset_name.text()))]);
        let mut add = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        if self.dataset_name == DatasetName::Sharegpt {
            add("dataset_path", json!(self.dataset_path));
            add("output_len", json!(self.output_len));
            return fields;
        }
        add("input_len", json!(lengths.input_tokens));
        add("output_len", json!(lengths.output_tokens));
        add("range_ratio", json!(lengths.range_ratio));
        add("prefix_len", json!(lengths.prefix_tokens));
        if self.dataset_name == DatasetName::MultiTurn {
            add("turns", json!(self.turns));
            add("think_time_s", json!(self.think_time.as_secs_f64()));
        }
        fields
    }
}

fn read_dataset(file: &Path) -> io::Result<Vec<u8>> {
    let mut json = Vec::new();
    File::open(file)?.take(DATASET_BYTES_MAX).read_to_end(&mut json)?;
    Ok(json)
}
