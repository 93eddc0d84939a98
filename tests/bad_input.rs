// SPDX-License-Identifier: Apache-2.0

//! User errors: each gives one line that says what to do, and the documented exit code.

use crate::harness::{
    ServedFleet, TIMEOUT, ballast, demo_7m, demo_22m, device, executable, has_no_result, proc, serve, text,
};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

// As documented in crates/service/src/exit.rs and docs/OPERATING.md.
const INTERNAL: i32 = 1;
const USAGE: i32 = 2;
const MODEL_REFUSED: i32 = 3;
const OUT_OF_RESOURCES: i32 = 4;
const ADDRESS: i32 = 6;

/// Checks the exit code, that stdout has no result, and that stderr has one line with these words.
#[track_caller]
fn check(output: &Output, code: i32, words: &[&str]) {
    let (stdout, stderr) = text(output);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert!(has_no_result(output), "{stdout}");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("ballast: ")).collect();
    assert_eq!(lines.len(), 1, "{stderr}");
    for word in words {
        assert!(lines[0].contains(word), "{:?} does not say {word:?}", lines[0]);
    }
}

fn generate(model: &Path) -> Command {
    let mut command = ballast();
    command.arg("generate").arg(model).args(["--prompt", "x", "--max-tokens", "4", "--device", &device()]);
    command
}

#[test]
fn a_missing_file_is_named() {
    check(
        &generate(Path::new("no-such-model.gguf")).output().unwrap(),
        MODEL_REFUSED,
        &["no-such-model.gguf"],
    );
}

#[test]
fn pipes_and_devices_are_refused_at_once_as_models_and_without_end_as_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe.gguf");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let run = folder.path().join("run");
    for file in [&pipe, Path::new("/dev/zero"), folder.path()] {
        for mut command in [generate(file), serve(&run, file, &[])] {
            check(&command.output().unwrap(), MODEL_REFUSED, &["is not a regular file"]);
        }
    }
    let output = ballast().args(["serve", "--config", "/dev/zero"]).output().unwrap();
    check(&output, USAGE, &["/dev/zero", "more than 1048576 bytes"]);
    assert!(!run.exists());
}

#[test]
fn a_file_that_is_no_gguf_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("picture.gguf");
    std::fs::write(&file, b"\x89PNG\r\n\x1a\nand so on, long enough for a header").unwrap();
    check(&generate(&file).output().unwrap(), MODEL_REFUSED, &["picture.gguf", "GGUF"]);
}

#[test]
fn a_context_beyond_the_models_own_is_refused_with_both_lengths() {
    let output = generate(&demo_7m()).args(["--ctx-size", "4097"]).output().unwrap();
    check(&output, USAGE, &["--ctx-size is 4097", "4096"]);
}

#[test]
fn a_truncated_file_names_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("short.gguf");
    let bytes = std::fs::read(demo_7m()).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 100_000]).unwrap();
    check(&generate(&file).output().unwrap(), MODEL_REFUSED, &["short.gguf", "tensor"]);
}

#[test]
fn an_unknown_architecture_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("strange.gguf");
    let mut bytes = std::fs::read(demo_7m()).unwrap();
    let at = bytes.windows(5).position(|window| window == b"qwen3").unwrap();
    bytes[at..at + 5].copy_from_slice(b"qwen9");
    std::fs::write(&file, bytes).unwrap();
    check(&generate(&file).output().unwrap(), MODEL_REFUSED, &["qwen9"]);
}

/// Has the same size as Q4_K, but no backend has kernels for it.
const IQ4_NL: u32 = 20;

#[test]
fn a_tensor_of_a_type_without_kernels_is_named_with_the_types_that_have_some() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("iq.gguf");
    let mut bytes = std::fs::read(demo_22m()).unwrap();
    let name = b"blk.0.ffn_up.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    // The name is followed by the dimension count, two dimensions of 8 bytes, and the type.
    let dtype = at + 4 + 2 * 8..at + 4 + 2 * 8 + 4;
    assert_eq!(bytes[dtype.clone()], 12_u32.to_le_bytes(), "Q4_K");
    bytes[dtype].copy_from_slice(&IQ4_NL.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    let words = ["iq.gguf", "blk.0.ffn_up.weight", "IQ4_NL", "Q2_K to Q6_K"];
    check(&generate(&file).output().unwrap(), MODEL_REFUSED, &words);
}

/// Text on a terminal in which an escape sequence of a file would take effect.
fn has_control_characters(text: &str) -> bool {
    text.chars().any(|character| character.is_control() && character != '\n')
}

#[test]
fn escape_sequences_of_a_file_are_printed_as_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("escapes.gguf");
    let mut bytes = std::fs::read(demo_7m()).unwrap();
    for (name, replaced) in [
        (&b"blk.0.ffn_up.weight"[..], &b"\x1b[2J\x1b]0;owned\x07....."[..]),
        (b"general.architecture", b"\x1b[31m\xc2\x9b32mchitecture"),
    ] {
        assert_eq!(name.len(), replaced.len());
        let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
        bytes[at..at + name.len()].copy_from_slice(replaced);
    }
    std::fs::write(&file, bytes).unwrap();
    let (report, errors) = text(&ballast().arg("inspect").arg(&file).output().unwrap());
    assert!(report.contains("\\u{1b}[2J") && report.contains("\\u{1b}[31m\\u{9b}32mchitecture"), "{report}");
    assert!(!has_control_characters(&report) && !has_control_characters(&errors), "{report:?} {errors:?}");
    let (_, errors) = text(&generate(&file).output().unwrap());
    assert!(!errors.is_empty() && !has_control_characters(&errors), "{errors:?}");
}

#[test]
fn a_model_name_that_changes_the_direction_of_text_is_printed_as_text() {
    let folder = tempfile::tempdir().unwrap();
    let json = serve(&folder.path().join("run"), &demo_7m(), &["--workers", "1", "--threads", "1"]);
    // JSON escapes by itself.
    let plain: Vec<OsString> =
        json.get_args().filter(|&argument| argument != "--json").map(Into::into).collect();
    let mut command = ballast();
    command.args(plain).args(["--name", "m\u{202e}"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut fleet = command.spawn().unwrap();
    let mut stdout = BufReader::new(fleet.stdout.take().unwrap());
    let mut announced = String::new();
    while !announced.contains("Ctrl-C") {
        assert!(stdout.read_line(&mut announced).unwrap() > 0, "{announced}");
    }
    let ps = ballast().args(["ps", "--runtime-dir"]).arg(folder.path().join("run")).output().unwrap();
    proc::send_signal(fleet.id(), "TERM");
    let output = fleet.wait_with_output().unwrap();
    for text in [announced, text(&ps).0] {
        assert!(text.contains("m\\u{202e}") && !text.contains('\u{202e}'), "{text:?}");
    }
    assert!(!text(&output).1.contains('\u{202e}'), "{}", text(&output).1);
}

#[test]
fn an_unknown_flag_is_a_usage_error() {
    let output = ballast().args(["generate", "--no-such-flag"]).output().unwrap();
    assert_eq!(output.status.code(), Some(USAGE));
}

#[test]
fn an_unknown_configuration_key_is_named_with_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ballast.toml");
    std::fs::write(&file, "no-such-key = 1\n").unwrap();
    let output = ballast().arg("serve").arg("--config").arg(&file).output().unwrap();
    check(&output, USAGE, &["ballast.toml", "no-such-key"]);
}

#[test]
fn a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = ballast().arg("serve").arg(demo_7m()).args(["--listen", &address]).output().unwrap();
    check(&output, ADDRESS, &[&address, "in use"]);
}

#[test]
fn a_runtime_directory_too_long_for_a_socket_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let long = folder.path().join("x".repeat(120));
    let output = ballast().arg("serve").arg(demo_7m()).arg("--runtime-dir").arg(&long).output().unwrap();
    check(&output, ADDRESS, &["socket", "runtime-dir"]);
}

#[test]
fn two_fleets_cannot_share_a_runtime_directory() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1"]);
    let output = ballast()
        .arg("serve")
        .arg(demo_7m())
        .args(["--listen", "127.0.0.1:0", "--runtime-dir"])
        .arg(fleet.runtime_dir())
        .output()
        .unwrap();
    check(&output, ADDRESS, &["in use"]);
    fleet.stop();
}

/// Runs `ballast generate` under a limit that the shell sets for itself first.
fn limited(limit: &str, model: &Path) -> Output {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("{limit} && exec \"$0\" generate \"$1\" --prompt x --max-tokens 4 --device host"))
        .arg(executable())
        .arg(model)
        .process_group(0);
    command.output().unwrap()
}

#[test]
fn too_little_memory_for_the_weights_says_how_much() {
    // 4096 blocks of 512 bytes are 2 MiB, less than the model. A memfd counts as a file, so the
    // limit on file size applies to it.
    check(&limited("ulimit -f 4096", &demo_7m()), OUT_OF_RESOURCES, &["bytes", "RLIMIT_FSIZE"]);
}

/// A cgroup with a memory limit; removed when dropped.
struct LimitedGroup(PathBuf);

impl LimitedGroup {
    /// Returns `None` and prints a SKIPPED line if this user may not create a cgroup.
    fn new(bytes: u64) -> Option<Self> {
        let memberships = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let of = |line: &str, prefix: &str| line.split_once(':')?.1.strip_prefix(prefix).map(str::to_owned);
        let places = [
            (":", "/sys/fs/cgroup", "memory.max"),
            ("memory:", "/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ];
        for (prefix, mount, limit) in places {
            let Some(own) = memberships.lines().find_map(|line| of(line, prefix)) else { continue };
            let name = format!("ballast-test-{}", std::process::id());
            let directory = Path::new(mount).join(own.trim_start_matches('/')).join(name);
            if std::fs::create_dir(&directory).is_err() {
                continue;
            }
            let group = Self(directory);
            // The file exists only in a mounted hierarchy; elsewhere this is an ordinary directory.
            let limit = std::fs::File::options().write(true).open(group.0.join(limit));
            if limit.and_then(|mut limit| limit.write_all(bytes.to_string().as_bytes())).is_ok() {
                return Some(group);
            }
        }
        crate::harness::report_skipped(format_args!("a cgroup with a memory limit cannot be made here"));
        None
    }
}

impl Drop for LimitedGroup {
    fn drop(&mut self) {
        // Its processes have ended, but the kernel may take a moment to notice.
        crate::harness::eventually("the cgroup is empty", || std::fs::remove_dir(&self.0).ok());
    }
}

#[test]
fn a_cgroup_that_cannot_hold_the_weights_says_how_much() {
    let model = crate::harness::synth("qwen3-0.6b", "q8_0");
    let Some(group) = LimitedGroup::new(256 << 20) else { return };
    let enter = format!("echo $$ > {}", group.0.join("cgroup.procs").display());
    check(&limited(&enter, &model), OUT_OF_RESOURCES, &["needed", "MiB"]);
}

#[test]
fn standard_input_that_cannot_be_read_is_no_end_of_a_chat() {
    let folder = tempfile::tempdir().unwrap();
    let not_utf8 = folder.path().join("latin-1");
    std::fs::write(&not_utf8, b"caf\xe9\n").unwrap();
    let template = folder.path().join("template");
    std::fs::write(&template, "{% for message in messages %}{{ message.content }}{% endfor %}").unwrap();
    for (input, why) in [(not_utf8.as_path(), "UTF-8"), (folder.path(), "Is a directory")] {
        let mut chat = ballast();
        chat.arg("chat").arg(demo_7m()).args(["--device", &device(), "--chat-template"]).arg(&template);
        let output = chat.stdin(std::fs::File::open(input).unwrap()).output().unwrap();
        check(&output, INTERNAL, &["standard input", why]);
    }
}

#[test]
fn too_few_descriptors_says_how_many() {
    check(&limited("ulimit -n 16", &demo_7m()), OUT_OF_RESOURCES, &["RLIMIT_NOFILE"]);
}

#[test]
fn a_file_changed_while_it_is_loaded_is_refused() {
    let model = crate::harness::synth("qwen3-0.6b", "q8_0");
    let folder = tempfile::tempdir_in(model.parent().unwrap()).unwrap();
    let copy = folder.path().join("changing.gguf");
    std::fs::copy(&model, &copy).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let child = crate::harness::serve(directory.path(), &copy, &["--workers", "1"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let root = child.id();
    crate::harness::eventually("a loader runs", || {
        proc::descendants(root).into_iter().find(|pid| proc::arguments(*pid).iter().any(|a| a == "loader"))
    });
    // Appending changes size and mtime; the inode stays the same.
    let mut file = std::fs::OpenOptions::new().append(true).open(&copy).unwrap();
    file.write_all(b"one line more").unwrap();
    let started = std::time::Instant::now();
    let output = child.wait_with_output().unwrap();
    assert!(started.elapsed() < TIMEOUT);
    check(&output, MODEL_REFUSED, &["changing.gguf", "changed"]);
}
