// SPDX-License-Identifier: Apache-2.0

//! Embeddings and scores of pairs of texts, on real fleets.
//!
//! The vectors are compared with those of MLX (`tests/data/embeddings/make.py`). Both use the same
//! weights. MLX computes in f32; the engine rounds activations to the type of the weights' blocks.
//! A hidden state of the wrong position, or one before the output norm, has a cosine below 0.9.

mod limits;

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::process::Command;

use gguf::{GgufWriter, Header, MetadataBuilder, TensorLayout};
use proto::v1::{EmbedInput, EmbedRequest, Pooling, RerankRequest, TokenIds, embed_input};
use quant::DType;
use serde_json::{Value, json};

use crate::harness::api::{TestRequest, connect, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, in_tree, model_table, proc, test_data};

const WIDTH: usize = 256;
/// Rounding to blocks of 8 bits changes a product by some thousandths.
const COSINE_MIN_Q8_0: f64 = 0.999;
/// Rounding to 11 bits changes a product by less than a ten-thousandth.
const COSINE_MIN_F16: f64 = 0.999_99;

/// Writes the demo model with this pooling, and with a classifier of two labels for rank pooling.
fn pooled_model(path: &Path, pooling_type: u32, classifier: Option<&[f32]>) {
    let bytes = std::fs::read(demo_7m()).unwrap();
    let header = Header::read(&bytes[..], bytes.len() as u64).unwrap();
    let mut metadata = MetadataBuilder::default();
    metadata.copy(header.metadata(), |_| true).unwrap();
    metadata.put("qwen3.pooling_type", pooling_type).unwrap();
    metadata.put("tokenizer.chat_template.rerank", "# {query}\n{document}\n").unwrap();
    metadata.put("qwen3.classifier.output_labels", &["yes", "no"][..]).unwrap();
    let mut layout = TensorLayout::default();
    for tensor in header.tensors() {
        layout.add(&tensor.name, tensor.dtype, &tensor.dims).unwrap();
    }
    if let Some(values) = classifier {
        layout.add("cls.output.weight", DType::F32, &[(values.len() / 2) as u64, 2]).unwrap();
    }
    let file = BufWriter::new(File::create(path).unwrap());
    let mut writer = GgufWriter::start(file, &metadata, layout).unwrap();
    for tensor in header.tensors() {
        let start = header.file_offset(tensor) as usize;
        writer.write(&bytes[start..start + tensor.bytes as usize]).unwrap();
    }
    if let Some(values) = classifier {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.write(&bytes).unwrap();
    }
    writer.finish().unwrap();
}

fn floats(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let product = |a: &[f32], b: &[f32]| -> f64 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    product(a, b) / (product(a, a) * product(b, b)).sqrt()
}

fn embed(http: &HttpClient, body: &Value) -> Vec<Vec<f32>> {
    let reply = http.post_json("/v1/embeddings", body);
    let data = reply["data"].as_array().unwrap();
    let in_order = data.iter().enumerate().all(|(index, entry)| entry["index"] == json!(index));
    assert!(in_order && reply["object"] == "list" && data[0]["object"] == "embedding", "{reply}");
    data.iter().map(|entry| floats(&entry["embedding"])).collect()
}

/// The fleet's model `model` gives the recorded vectors of `kind`.
fn check_golden(http: &HttpClient, model: &str, kind: &str, file: &str, cosine_min: f64) {
    let path = in_tree("tests/data/embeddings").join(file);
    let golden: Vec<Value> = serde_json::from_reader(BufReader::new(File::open(path).unwrap())).unwrap();
    let inputs: Vec<&Value> = golden.iter().map(|entry| &entry["tokens"]).collect();
    let found = embed(http, &json!({"model": model, "input": inputs}));
    assert_eq!(found.len(), golden.len());
    for (found, entry) in found.iter().zip(&golden) {
        let likeness = cosine(found, &floats(&entry[kind]));
        eprintln!("{model}, {kind}: the cosine with MLX's vector is {likeness}");
        assert!(likeness >= cosine_min, "{model}: the cosine with MLX's vector is {likeness}");
        let length: f64 = found.iter().map(|&value| f64::from(value).powi(2)).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }
}

/// One copy of a demo model as it is, with pooling by setting; one with pooling by its file.
struct PooledFleet {
    fleet: ServedFleet,
    http: HttpClient,
    classifier: Vec<f32>,
    _folder: tempfile::TempDir,
}

fn pooled_fleet() -> PooledFleet {
    let folder = tempfile::tempdir().unwrap();
    let (last, rank) = (folder.path().join("last.gguf"), folder.path().join("rank.gguf"));
    let classifier: Vec<f32> =
        (0..2 * WIDTH).map(|index| ((index * 37 % 101) as f32 - 50.0) / 100.0).collect();
    pooled_model(&last, 3, None);
    pooled_model(&rank, 4, Some(&classifier));
    let models = [
        model_table("plain", &demo_7m(), ""),
        model_table("mean", &demo_7m(), "pooling = \"mean\""),
        model_table("last", &last, ""),
        model_table("rank", &rank, ""),
    ];
    let fleet = ServedFleet::start_config(&models.concat());
    let http = HttpClient::connect(&fleet);
    PooledFleet { fleet, http, classifier, _folder: folder }
}

fn check_capabilities(http: &HttpClient) {
    let models: Value = serde_json::from_str(&http.get("/v1/models").1).unwrap();
    let pooling = |name: &str| {
        let entry = models["data"].as_array().unwrap().iter().find(|entry| entry["id"] == name).unwrap();
        entry["pooling"].clone()
    };
    assert_eq!(
        ["plain", "mean", "last", "rank"].map(pooling),
        [json!(null), json!("mean"), json!("last"), json!("rank")]
    );
    for model in ["plain", "rank"] {
        let (status, text) = http.post("/v1/embeddings", &json!({"model": model, "input": "x"}));
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &error["error"]["param"]), (400, &json!("model")), "{text}");
        assert!(text.contains("makes no embeddings; models of this fleet that do: last, mean"), "{text}");
    }
    let pair = json!({"model": "plain", "query": "x", "documents": ["y"]});
    let (status, text) = http.post("/v1/rerank", &pair);
    assert!(status == 400 && text.contains("that do: last, mean, rank"), "{text}");
}

fn check_forms(http: &HttpClient) {
    let tokens = json!({"model": "last", "input": [0, 5, 6, 7, 8]});
    let whole = embed(http, &tokens).remove(0);
    let with = |name: &str, value: Value| {
        let mut body = tokens.clone();
        body[name] = value;
        body
    };
    let reply = http.post_json("/v1/embeddings", &with("encoding_format", json!("base64")));
    let bytes: Vec<u8> = whole.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(reply["data"][0]["embedding"].as_str().unwrap().len(), bytes.len().div_ceil(3) * 4);
    assert_eq!(reply["usage"], json!({"prompt_tokens": 5, "total_tokens": 5}));
    let short = embed(http, &with("dimensions", json!(16))).remove(0);
    assert!(short.len() == 16 && cosine(&short, &whole[..16]) > 0.999_999);
    let long = embed(http, &with("normalize", json!(false))).remove(0);
    assert!(long.iter().map(|value| value * value).sum::<f32>() > 2.0 && cosine(&long, &whole) > 0.999_999);
    let cut = embed(http, &with("truncate_prompt_tokens", json!(3))).remove(0);
    assert_eq!(cut, embed(http, &json!({"model": "last", "input": [[0, 5, 6]]})).remove(0));
    let texts =
        embed(http, &json!({"model": "last", "input": ["def f():", "x = 1", "def f():"], "user": "u"}));
    assert!(texts.len() == 3 && texts[0] == texts[2] && texts[0] != texts[1]);
    let many = json!(vec!["x"; 2049]);
    for (name, value, allowed) in [
        ("input", json!([]), "empty"),
        ("input", json!([[]]), "empty"),
        ("input", json!({"a": 1}), "expected a string"),
        ("input", json!([99_999_999]), "vocabulary"),
        ("input", json!(vec![1; 5000]), "context"),
        ("input", many, "at most 2048"),
        ("dimensions", json!(0), "1 to 256"),
        ("dimensions", json!(257), "1 to 256"),
        ("encoding_format", json!("int8"), "base64"),
        ("truncate_prompt_tokens", json!(0), "-1 and 1 to"),
    ] {
        let (status, text) = http.post("/v1/embeddings", &with(name, value));
        let error: Value = serde_json::from_str(&text).unwrap();
        let param = error["error"]["param"].as_str().unwrap_or_default();
        assert!(status == 400 && param.starts_with(name) && text.contains(allowed), "{name}: {text}");
    }
}

fn check_reranking(pooled: &PooledFleet) {
    let PooledFleet { http, classifier, .. } = pooled;
    let (query, documents) = ("sort a list", ["def sort(xs):", "import os", "class Tree:"]);
    let body = json!({"model": "rank", "query": query, "documents": documents});
    let reply = http.post_json("/v1/rerank", &body);
    // The classifier's labels, from the state of the last token of the prompt.
    let label = |state: &[f32], index: usize| {
        let row = &classifier[index * WIDTH..(index + 1) * WIDTH];
        state.iter().zip(row).map(|(&state, &row)| f64::from(state) * f64::from(row)).sum::<f64>()
    };
    let probability = |document: &str| {
        let prompt = format!("# {query}\n{document}\n");
        let body = json!({"model": "last", "input": prompt, "normalize": false, "add_special_tokens": false});
        let state = embed(http, &body).remove(0);
        1.0 / (1.0 + (label(&state, 1) - label(&state, 0)).exp())
    };
    let results = reply["results"].as_array().unwrap();
    let scores: Vec<f64> = results.iter().map(|result| result["relevance_score"].as_f64().unwrap()).collect();
    assert!(scores.len() == 3 && scores.is_sorted_by(|a, b| a >= b), "{reply}");
    for (result, score) in results.iter().zip(&scores) {
        let document = documents[result["index"].as_u64().unwrap() as usize];
        assert_eq!(result["document"]["text"], document);
        let expected = probability(document);
        assert!((score - expected).abs() < 1e-3, "{document}: {score} and {expected}");
    }
    let top = json!({
        "model": "last", "query": query, "documents": [documents[0], {"text": query}], "top_n": 1,
        "return_documents": false,
    });
    let best = http.post_json("/rerank", &top);
    let result = &best["results"][0];
    assert_eq!((&result["index"], result.get("document")), (&json!(1), None), "{best}");
    assert!((result["relevance_score"].as_f64().unwrap() - 1.0).abs() < 1e-6, "the same text: {best}");
    let scored = http.post_json("/score", &json!({"model": "rank", "text_1": query, "text_2": documents}));
    for (result, score) in results.iter().zip(&scores) {
        assert_eq!(scored["data"][result["index"].as_u64().unwrap() as usize]["score"], json!(score));
    }
}

fn check_grpc(pooled: &PooledFleet) {
    let expected = embed(&pooled.http, &json!({"model": "mean", "input": [0, 5, 6, 7]})).remove(0);
    pooled.http.runtime.block_on(async {
        let mut client = connect(&pooled.fleet.grpc).await;
        let tokens = Some(embed_input::Input::Tokens(TokenIds { ids: vec![0, 5, 6, 7] }));
        let request = |model: &str| EmbedRequest {
            model: model.to_owned(),
            inputs: vec![EmbedInput { input: tokens.clone() }],
            ..EmbedRequest::default()
        };
        let reply = client.embed(request("mean")).await.unwrap().into_inner();
        assert_eq!((&reply.embeddings[0].values, reply.prompt_tokens), (&expected, 4));
        let refused = client.embed(request("plain")).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
        let rerank = RerankRequest {
            model: "last".to_owned(),
            query: "x".to_owned(),
            documents: vec!["y".to_owned(), "x".to_owned()],
            top_n: 1,
            ..RerankRequest::default()
        };
        let reply = client.rerank(rerank).await.unwrap().into_inner();
        assert!(reply.results.len() == 1 && reply.results[0].index == 1, "{reply:?}");
        let models = client.list_models(proto::v1::ListModelsRequest {}).await.unwrap().into_inner().models;
        let rank = models.iter().find(|model| model.name == "rank").unwrap();
        assert_eq!((rank.pooling(), rank.embedding_length), (Pooling::Rank, WIDTH as u32));
    });
}

#[test]
fn models_that_pool_make_embeddings_and_score_pairs() {
    let pooled = pooled_fleet();
    check_golden(&pooled.http, "last", "last", "pycoder-7m-q8_0.json", COSINE_MIN_Q8_0);
    check_golden(&pooled.http, "mean", "mean", "pycoder-7m-q8_0.json", COSINE_MIN_Q8_0);
    check_capabilities(&pooled.http);
    check_forms(&pooled.http);
    check_reranking(&pooled);
    check_grpc(&pooled);
    pooled.fleet.stop();
}

#[test]
fn embeddings_of_an_f16_model_equal_those_of_another_implementation() {
    let Some(model) = test_data("models/pycoder-7m-f16.gguf") else { return };
    let fleet = ServedFleet::start(&model, &["--workers", "1", "--threads", "1", "--pooling", "last"]);
    let name = "pycoder-7m-f16";
    check_golden(&HttpClient::connect(&fleet), name, "last", "pycoder-7m-f16.json", COSINE_MIN_F16);
    fleet.stop();
}

/// Sends each input as a request of its own, all at once. Returns the vectors' bits.
async fn embed_at_once(fleet: &ServedFleet, inputs: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let client = reqwest::Client::new();
    let tasks: Vec<_> = inputs
        .iter()
        .map(|input| {
            let request = client.post(format!("{}/v1/embeddings", fleet.http)).json(&json!({"input": input}));
            tokio::spawn(async move {
                let reply = request.send().await.unwrap();
                let (status, body) = (reply.status().as_u16(), reply.json::<Value>().await.unwrap());
                assert_eq!(status, 200, "{body}");
                floats(&body["data"][0]["embedding"]).iter().map(|value| value.to_bits()).collect()
            })
        })
        .collect();
    let mut vectors = Vec::new();
    for task in tasks {
        vectors.push(task.await.unwrap());
    }
    vectors
}

#[test]
fn i5_embeddings_beside_streams_and_after_a_killed_worker_have_the_same_bits() {
    let arguments = ["--workers", "2", "--threads", "1", "--routing", "least-loaded", "--pooling", "mean"];
    let fleet = ServedFleet::start(&demo_7m(), &arguments);
    let inputs: Vec<Vec<u32>> = (0..32)
        .map(|text: u32| (0..40 + 5 * text).map(|place| 5 + (place * (text + 3)) % 900).collect())
        .collect();
    let streams: Vec<TestRequest> = (0..6)
        .map(|seed| TestRequest {
            prompt: (0..20).map(|place| 10 + place * 13 + seed as u32).collect(),
            max_tokens: 200,
            temperature: 0.7,
            seed,
            ..TestRequest::default()
        })
        .collect();
    let tokens = |found: Vec<Result<_, tonic::Status>>| -> Vec<Vec<u32>> {
        found
            .into_iter()
            .map(|found: Result<crate::harness::api::Continuation, _>| found.unwrap().tokens)
            .collect()
    };
    runtime().block_on(async {
        let mut alone = Vec::new();
        for input in &inputs {
            alone.extend(embed_at_once(&fleet, std::slice::from_ref(input)).await);
        }
        let expected = tokens(generate_all(&fleet.grpc, &streams).await);
        let (beside, found) =
            tokio::join!(embed_at_once(&fleet, &inputs), generate_all(&fleet.grpc, &streams));
        assert_eq!(tokens(found), expected);
        assert!(beside == alone, "a vector depends on its batch");
        let victim = fleet.processes_by_role("worker")[0].clone();
        let (after, ()) = tokio::join!(embed_at_once(&fleet, &inputs), async {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            proc::send_signal(victim.pid, "KILL");
        });
        assert!(after == alone, "a vector depends on its worker");
    });
    fleet.stop();
}

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

#[test]
#[ignore = "nightly: installs the package openai"]
fn nightly_the_openai_python_client_gets_embeddings() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1", "--pooling", "last"]);
    let python: PathBuf = folder.path().join("venv/bin/python");
    run(Command::new("python3").args(["-m", "venv"]).arg(folder.path().join("venv")));
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "openai==3.54.0"]));
    run(Command::new(&python).arg(in_tree("tests/openai_embeddings.py")).arg(&fleet.http));
    fleet.stop();
}
