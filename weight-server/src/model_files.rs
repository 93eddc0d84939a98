// SPDX-License-Identifier: Apache-2.0

//! Opens the files of a model, and requests its load.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gguf::SplitName;
use memory::manifest::{Digest, FileIdentity};
use tokio::sync::{oneshot, watch};

use crate::catalog::LoadKey;
use crate::events::{LoadOutcome, LoadParams};
use crate::messages::{InputSender, LoadCall, LoopInput};
use crate::refusal::{LoadFailure, LoaderErrorKind};
use crate::waiters::LoadProgress;

/// All their descriptors travel in one packet.
const MAX_MODEL_FILES: u32 = 128;

/// A file on a mount whose server is gone never opens. A resident model does without its file.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Part of a file's identity. Most of the metadata lies here, where a file is changed in place.
const HEAD_BYTES: u64 = 1 << 20;

/// The progress of a load, and its outcome.
pub(crate) type LoadReceivers =
    (watch::Receiver<Option<LoadProgress>>, oneshot::Receiver<Result<LoadOutcome, LoadFailure>>);

/// Opens the model's files and requests a load; used by the admin service and for configured
/// models.
pub(crate) async fn request_load(
    inputs: &InputSender,
    model: String,
    path: PathBuf,
    device: String,
    one_per_tensor: bool,
) -> LoadReceivers {
    let asked = path.clone();
    let opened = blocking(move || open_model(&asked));
    let opened = tokio::time::timeout(OPEN_TIMEOUT, opened).await.unwrap_or_else(|_| {
        let seconds = OPEN_TIMEOUT.as_secs();
        let text = format!("model file {} does not open within {seconds} s: check its mount", path.display());
        Err(LoadFailure::Loader { kind: LoaderErrorKind::File, text })
    });
    let key = opened.map(|files| LoadKey {
        files: files.into_iter().map(|(identity, _)| identity).collect(),
        layout: crate::loader::layout_for_device(&device),
        device: device.clone(),
        one_per_tensor,
    });
    let (progress, watch) = watch::channel(None);
    let (answer, answered) = oneshot::channel();
    let params = LoadParams { model, path, device, key };
    inputs.send(LoopInput::Load { params, call: LoadCall { progress, answer } }).await;
    (watch, answered)
}

/// Opens the model at a path: one file, or all files of a split model.
pub(crate) fn open_model(path: &Path) -> Result<Vec<(FileIdentity, File)>, LoadFailure> {
    let split = path.file_name().and_then(|name| name.to_str()).and_then(SplitName::parse);
    let paths = match split {
        Some(name) if name.count > MAX_MODEL_FILES => {
            let text = format!(
                "model {} has {} files, at most {MAX_MODEL_FILES} are taken",
                path.display(),
                name.count
            );
            return Err(LoadFailure::Loader { kind: LoaderErrorKind::Unsupported, text });
        }
        Some(name) if name.number == 1 => {
            (1..=name.count).map(|number| path.with_file_name(name.sibling(number))).collect()
        }
        // A single file. If it is a later part of a split model, its header says so.
        _ => vec![path.to_owned()],
    };
    open_files(paths)
}

pub(crate) fn open_files(paths: Vec<PathBuf>) -> Result<Vec<(FileIdentity, File)>, LoadFailure> {
    paths
        .into_iter()
        .map(|path| {
            let complain = |what: &str| {
                let text = format!("model file {} {what}", path.display());
                LoadFailure::Loader { kind: LoaderErrorKind::File, text }
            };
            // Without O_NONBLOCK, opening a FIFO would wait for a writer.
            let opened = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(&path);
            let file = opened.map_err(|error| complain(&format!("cannot be opened: {error}")))?;
            let metadata =
                file.metadata().map_err(|error| complain(&format!("cannot be inspected: {error}")))?;
            if !metadata.is_file() {
                return Err(complain("is not a regular file"));
            }
            let head = head_digest(&file).map_err(|error| complain(&format!("cannot be read: {error}")))?;
            let identity =
                FileIdentity { head_digest: Some(head), ..FileIdentity::of(path.clone(), &metadata) };
            Ok((identity, file))
        })
        .collect()
}

/// Leaves the position of the file at its start.
fn head_digest(mut file: &File) -> io::Result<Digest> {
    let mut head = Vec::new();
    file.take(HEAD_BYTES).read_to_end(&mut head)?;
    file.rewind()?;
    Ok(*blake3::hash(&head).as_bytes())
}

/// Runs file system calls on a blocking thread, because they may take long.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        // The task is cancelled only when the runtime shuts down, and then this code does not run.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
