// SPDX-License-Identifier: Apache-2.0

//! Models whose tokenizer or chat template cannot be used, and models without tokenizer.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use gguf::{GgufWriter, Header, MetadataBuilder, StringArray, TensorLayout};
use proto::v1::generate_request::Prompt;
use proto::v1::{DetokenizeRequest, GenerateRequest, TokenizeRequest};
use serde_json::{Value, json};
use tonic::Code;

use crate::harness::api::{TestRequest, connect, generate};
use crate::harness::http::HttpClient;
use crate::harness::unusable_worker::UnusableWorker;
use crate::harness::{ServedFleet, ballast, demo_7m, device, eventually, proc, text};

// As documented in crates/service/src/exit.rs and docs/OPERATING.md.
const USAGE: i32 = 2;
const MODEL_REFUSED: i32 = 3;
const OUT_OF_RESOURCES: i32 = 4;

/// A model is refused at once. The limit is far below the 60 s for which a start waits without
/// progress, and allows for a busy machine.
const AT_ONCE: Duration = Duration::from_secs(40);

const TOKENS: &str = "tokenizer.ggml.tokens";
const MODEL: &str = "tokenizer.ggml.model";
pub(crate) const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Doubles a string forty times: a terabyte, in some hundred instructions.
pub(crate) const DOUBLING_TEMPLATE: &str = "{% set x = namespace(s='abcdefgh') %}\
    {% for _ in range(40) %}{% set x.s = x.s ~ x.s %}{% endfor %}{{ x.s|length }}";

/// Never ends by itself.
pub(crate) const ENDLESS_TEMPLATE: &str = "{% for a in range(99999) %}{% for b in range(99999) %}{% if false %}x{% endif %}{% endfor %}{% endfor %}";

/// Writes the demo model without the keys that begin with one of `without`, and with other keys.
pub(crate) fn rewrite(path: &Path, without: &[&str], put: impl FnOnce(&mut MetadataBuilder)) {
    let bytes = std::fs::read(demo_7m()).unwrap();
    let header = Header::read(&bytes[..], bytes.len() as u64).unwrap();
    let mut metadata = MetadataBuilder::default();
    metadata.copy(header.metadata(), |key| !without.iter().any(|prefix| key.starts_with(prefix))).unwrap();
    put(&mut metadata);
    let mut layout = TensorLayout::default();
    for tensor in header.tensors() {
        layout.add(&tensor.name, tensor.dtype, &tensor.dims).unwrap();
    }
    let file = BufWriter::new(File::create(path).unwrap());
    let mut writer = GgufWriter::start(file, &metadata, layout).unwrap();
    for tensor in header.tensors() {
        let start = header.file_offset(tensor) as usize;
        writer.write(&bytes[start..start + tensor.bytes as usize]).unwrap();
    }
    writer.finish().unwrap();
}

/// The texts of the demo model's tokens.
fn tokens() -> Vec<Vec<u8>> {
    let file = File::open(demo_7m()).unwrap();
    let length = file.metadata().unwrap().len();
    let header = Header::read(BufReader::new(file), length).unwrap();
    header.metadata().require::<StringArray<'_>>(TOKENS).unwrap().iter().map(<[u8]>::to_vec).collect()
}

fn without_tokenizer(path: &Path) {
    rewrite(path, &["tokenizer."], |metadata| {
        metadata.put(MODEL, "none").unwrap();
        metadata.put("qwen3.vocab_size", tokens().len() as u32).unwrap();
    });
}

/// Every model that cannot be served, with words of the sentence that says so.
fn unusable_models(folder: &Path) -> Vec<(PathBuf, Vec<&'static str>)> {
    let make = |name: &str, without: &[&str], words: &[&'static str], put: &dyn Fn(&mut MetadataBuilder)| {
        let path = folder.join(format!("{name}.gguf"));
        rewrite(&path, without, |metadata| put(metadata));
        (path, words.to_vec())
    };
    let vocabulary = tokens().len() as u32;
    let mut duplicate = tokens();
    duplicate[5000] = duplicate[4000].clone();
    vec![
        make("pre", &["tokenizer.ggml.pre"], &["tokenizer.ggml.pre", "gpt-9"], &|metadata| {
            metadata.put("tokenizer.ggml.pre", "gpt-9").unwrap();
        }),
        make("duplicate", &[TOKENS], &[TOKENS, "4000", "5000"], &|metadata| {
            metadata.put(TOKENS, &duplicate[..]).unwrap();
        }),
        make("empty", &["tokenizer."], &[TOKENS], &|metadata| {
            metadata.put("qwen3.vocab_size", vocabulary).unwrap();
            metadata.put(MODEL, "gpt2").unwrap();
            metadata.put("tokenizer.ggml.pre", "qwen2").unwrap();
            metadata.put(TOKENS, &[""; 0][..]).unwrap();
        }),
        make("range", &["tokenizer.ggml.eos_token_id"], &["eos_token_id", "99999"], &|metadata| {
            metadata.put("tokenizer.ggml.eos_token_id", 99_999_u32).unwrap();
        }),
        make("no-tokenizer", &["tokenizer."], &[MODEL, "none"], &|metadata| {
            metadata.put("qwen3.vocab_size", vocabulary).unwrap();
        }),
        make("doubling", &[CHAT_TEMPLATE], &[CHAT_TEMPLATE, "MiB"], &|metadata| {
            metadata.put(CHAT_TEMPLATE, DOUBLING_TEMPLATE).unwrap();
        }),
        make("endless", &[CHAT_TEMPLATE], &[CHAT_TEMPLATE, "instructions"], &|metadata| {
            metadata.put(CHAT_TEMPLATE, ENDLESS_TEMPLATE).unwrap();
        }),
    ]
}

/// Runs a command that has to refuse a model with one line of these words. Returns its output.
#[track_caller]
pub(crate) fn check_refused(command: &mut Command, model: &Path, words: &[&str]) -> Output {
    let started = Instant::now();
    let output = command.output().unwrap();
    let (took, stderr) = (started.elapsed(), text(&output).1);
    assert_eq!(output.status.code(), Some(MODEL_REFUSED), "{command:?}: {stderr}");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("ballast: ")).collect();
    assert_eq!(lines.len(), 1, "{command:?}: {stderr}");
    let name = model.file_name().unwrap().to_str().unwrap();
    for word in words.iter().chain(&[name]) {
        assert!(lines[0].contains(word), "{command:?}: {:?} does not say {word:?}", lines[0]);
    }
    assert!(took < AT_ONCE, "{command:?} took {took:?}");
    output
}

fn generate_command(model: &Path) -> Command {
    let mut command = ballast();
    command.arg("generate").arg(model).args(["--prompt", "x", "--max-tokens", "4", "--device", &device()]);
    command.args(["--workers", "1", "--threads", "1"]);
    command
}

#[test]
fn generate_refuses_an_unusable_tokenizer_or_template_at_once() {
    let folder = tempfile::tempdir().unwrap();
    for (model, words) in unusable_models(folder.path()) {
        let output = check_refused(&mut generate_command(&model), &model, &words);
        assert_eq!(text(&output).0, "");
    }
}

/// The child that checks tokenizer and template is killed from outside, as the kernel does when a
/// cgroup is out of memory. The file is not blamed.
#[test]
fn a_check_that_is_killed_from_outside_blames_memory_and_not_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("endless.gguf");
    rewrite(&model, &[CHAT_TEMPLATE], |metadata| metadata.put(CHAT_TEMPLATE, ENDLESS_TEMPLATE).unwrap());
    // The check takes some tenths of a second, so that not every signal comes in time.
    let killed = (0..20).find_map(|attempt| {
        let mut command = ballast();
        command.arg("inspect").arg(&model).stdout(Stdio::null()).stderr(Stdio::piped());
        let inspect = command.spawn().unwrap();
        let is_check = |pid: &u32| proc::arguments(*pid).iter().any(|word| word == "loader");
        while proc::is_alive(inspect.id()) {
            let Some(check) = proc::descendants(inspect.id()).into_iter().find(is_check) else { continue };
            std::thread::sleep(Duration::from_millis(5 * attempt));
            proc::send_signal(check, "KILL");
            break;
        }
        let output = inspect.wait_with_output().unwrap();
        assert!(!text(&output).1.contains("needs more than"), "{}", text(&output).1);
        // At once, the file's tokenizer is not under check yet.
        (attempt >= 4 && output.status.code() == Some(OUT_OF_RESOURCES)).then(|| text(&output).1)
    });
    let stderr = killed.expect("one check of many is killed");
    assert!(stderr.contains("killed by signal 9") && stderr.contains("out of memory"), "{stderr}");
    assert!(!stderr.contains(CHAT_TEMPLATE), "{stderr}");
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model_has_embeddings_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("excess.gguf");
    rewrite(&model, &[], |metadata| metadata.put("qwen3.vocab_size", 8000_u32).unwrap());
    check_refused(&mut generate_command(&model), &model, &[TOKENS, "8192", "qwen3.vocab_size", "8000"]);
}

#[test]
fn inspect_reports_an_unusable_tokenizer_or_template_and_still_prints_the_header() {
    let folder = tempfile::tempdir().unwrap();
    for (model, words) in unusable_models(folder.path()) {
        let mut words = words;
        let output = ballast().arg("inspect").arg(&model).output().unwrap();
        let (stdout, stderr) = text(&output);
        assert_eq!(output.status.code(), Some(MODEL_REFUSED), "{stderr}");
        assert!(stdout.contains("general.name") && stdout.contains("would be refused"), "{stdout}");
        words.retain(|word| !stderr.contains(word));
        assert!(words.is_empty(), "{stderr:?} does not say {words:?}");
    }
    let output = ballast().arg("inspect").arg(demo_7m()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output).1);
}

#[test]
fn serve_and_load_refuse_an_unusable_model_and_the_fleet_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let models = unusable_models(folder.path());
    let runtime_dir = folder.path().join("run");
    for (model, words) in models.iter().filter(|(path, _)| path.ends_with("doubling.gguf")) {
        let mut command = crate::harness::serve(&runtime_dir, model, &["--workers", "1"]);
        check_refused(&mut command, model, words);
    }
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    for (model, words) in models.iter().filter(|(path, _)| !path.ends_with("endless.gguf")) {
        let mut command = ballast();
        command.arg("load").arg(model).args(["--threads", "1", "--device", &device(), "--runtime-dir"]);
        check_refused(command.arg(fleet.runtime_dir()), model, words);
    }
    let (status, answer) = HttpClient::connect(&fleet)
        .post("/v1/completions", &json!({"prompt": "def add(a, b):", "max_tokens": 4}));
    assert_eq!(status, 200, "{answer}");
    fleet.stop();
}

/// The ids that the demo model generates greedily, and the same without its tokenizer.
#[test]
fn a_model_without_tokenizer_is_served_by_token_ids_with_the_same_ids() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("ids.gguf");
    without_tokenizer(&model);
    let prompt: Vec<u32> = vec![0, 300, 301, 302];
    let request = TestRequest { prompt: prompt.clone(), max_tokens: 12, ..TestRequest::default() };
    let body =
        json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": true});

    let continued = |model: &Path| {
        let fleet = ServedFleet::start(model, &["--workers", "1", "--threads", "1"]);
        let http = HttpClient::connect(&fleet);
        let over_grpc = http.runtime.block_on(async {
            let mut client = connect(&fleet.grpc).await;
            generate(&mut client, &request, |_| ()).await.unwrap()
        });
        (fleet, http, over_grpc)
    };
    let (fleet, _, expected) = continued(&demo_7m());
    fleet.stop();
    let (fleet, http, over_grpc) = continued(&model);
    assert_eq!((&over_grpc.tokens, &over_grpc.logprob_bits), (&expected.tokens, &expected.logprob_bits));
    assert_eq!(over_grpc.text, "");
    let answer = http.post_json("/v1/completions", &body);
    assert_eq!(answer["choices"][0]["token_ids"], json!(expected.tokens), "{answer}");
    let first = format!("token_id:{}", expected.tokens[0]);
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"][0], json!(first));
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = http.post_stream("/v1/completions", &streamed);
    let ids: Vec<Value> = events
        .iter()
        .flat_map(|event| event["choices"][0]["token_ids"].as_array().unwrap().clone())
        .collect();
    assert_eq!(json!(ids), json!(expected.tokens));
    let allowed =
        json!({"prompt": prompt, "max_tokens": 6, "temperature": 2.0, "allowed_token_ids": [5, 9, 300]});
    let answer = http.post_json("/v1/completions", &allowed);
    let ids = answer["choices"][0]["token_ids"].as_array().unwrap();
    assert_eq!(ids.len(), 6, "{answer}");
    assert!(ids.iter().all(|id| [5, 9, 300].contains(&id.as_u64().unwrap())), "{answer}");
    text_is_refused_by_name(&http, &fleet, &prompt);
    fleet.stop();
}

fn text_is_refused_by_name(http: &HttpClient, fleet: &ServedFleet, prompt: &[u32]) {
    let grammar = json!({"type": "json_object"});
    for (path, param, body) in [
        ("/v1/completions", "prompt", json!({"prompt": "text"})),
        ("/v1/completions", "stop", json!({"prompt": prompt, "stop": "x"})),
        ("/v1/completions", "bad_words", json!({"prompt": prompt, "bad_words": ["x"]})),
        ("/v1/completions", "echo", json!({"prompt": prompt, "echo": true})),
        ("/v1/completions", "response_format", json!({"prompt": prompt, "response_format": grammar})),
        ("/v1/chat/completions", "messages", json!({"messages": [{"role": "user", "content": "Hi"}]})),
    ] {
        let (status, answer) = http.post(path, &body);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("has no tokenizer"), "{answer}");
    }
    http.runtime.block_on(async {
        let mut client = connect(&fleet.grpc).await;
        let prompt = Some(Prompt::Text("text".to_owned()));
        let request = GenerateRequest { prompt, max_tokens: 1, ..GenerateRequest::default() };
        let tokenize = TokenizeRequest { text: "text".to_owned(), ..TokenizeRequest::default() };
        let detokenize = DetokenizeRequest { tokens: vec![1], ..DetokenizeRequest::default() };
        for status in [
            client.generate(request).await.unwrap_err(),
            client.tokenize(tokenize).await.unwrap_err(),
            client.detokenize(detokenize).await.unwrap_err(),
        ] {
            assert_eq!(status.code(), Code::InvalidArgument, "{status}");
            assert!(status.message().contains("has no tokenizer"), "{status}");
        }
    });
}

#[test]
fn commands_that_need_text_say_that_the_model_has_no_tokenizer_and_eval_takes_ids() {
    let folder = tempfile::tempdir().unwrap();
    let (model, ids) = (folder.path().join("ids.gguf"), folder.path().join("ids.json"));
    without_tokenizer(&model);
    std::fs::write(&ids, "[0, 300, 301]").unwrap();
    let logits = |model: &Path, out: &str| {
        let out = folder.path().join(out);
        let output = ballast()
            .arg("eval")
            .arg(model)
            .args(["--threads", "1", "--device", &device(), "--tokens"])
            .arg(&ids)
            .arg("--logits-out")
            .arg(&out)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output).1);
        std::fs::read(out).unwrap()
    };
    assert!(logits(&model, "without.f32") == logits(&demo_7m(), "with.f32"));

    let output = ballast().arg("tokenize").arg(&model).args(["--prompt", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(MODEL_REFUSED));
    assert!(text(&output).1.contains("has no tokenizer"), "{}", text(&output).1);
    let output = generate_command(&model).output().unwrap();
    assert_eq!(output.status.code(), Some(USAGE), "{}", text(&output).1);
    assert!(text(&output).1.contains("has no tokenizer"), "{}", text(&output).1);
    let output = ballast().arg("inspect").arg(&model).output().unwrap();
    assert!(output.status.success() && text(&output).0.contains("has no tokenizer"));
}

/// A valid template that cannot be parsed here costs the model its chats, not its completions.
#[test]
fn a_model_with_a_broken_template_completes_text_and_inspect_says_why_it_does_not_chat() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("broken.gguf");
    rewrite(&model, &[CHAT_TEMPLATE], |metadata| metadata.put(CHAT_TEMPLATE, "{% if %}").unwrap());
    let output = ballast().arg("inspect").arg(&model).output().unwrap();
    assert!(output.status.success(), "{}", text(&output).1);
    assert!(text(&output).0.contains("chats would be refused: chat_template is not a valid template"));
    let output = generate_command(&model).output().unwrap();
    assert!(output.status.success(), "{}", text(&output).1);
}

/// Each refusal doubles the pause: 1 s, 2 s, 4 s. Without pauses, the router would ask ten times a
/// second.
#[test]
fn a_worker_that_the_router_cannot_serve_is_asked_with_growing_pauses_and_ps_says_why() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let router_status = || {
        let lines = fleet.try_ps_lines()?;
        let router = lines.iter().find(|line| line["role"] == "router")?;
        Some(router["status"].as_str()?.to_owned())
    };
    let worker = UnusableWorker::start(fleet.runtime_dir(), 50);
    let refused = |status: &String| status.contains("cannot serve worker-50");
    let status = eventually("ps shows the refusal", || router_status().filter(refused));
    assert!(status.contains("tokenizer.ggml.model is \"abacus\""), "{status}");
    std::thread::sleep(Duration::from_secs(8));
    let calls = worker.metadata_calls();
    assert!((2..=5).contains(&calls), "the router asked {calls} times");
    let (http, request) = (HttpClient::connect(&fleet), json!({"prompt": "def", "max_tokens": 4}));
    assert_eq!(http.post("/v1/completions", &request).0, 200);
    drop(worker);
    // The fake worker may have removed its socket already.
    let _ = std::fs::remove_file(fleet.runtime_dir().join("worker-50.sock"));
    eventually("ps forgets the refusal", || router_status().filter(|status| !refused(status)));
    fleet.stop();
}
