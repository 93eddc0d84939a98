// SPDX-License-Identifier: Apache-2.0

//! End-to-end tests: they start the real executable, observe it from outside, and kill parts of it.
//! One binary holds all of them, so that it is linked once.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do: at once, saying where")]

mod access;
mod access_log;
mod admin_audit;
mod admission;
mod bad_input;
mod bench_serve;
mod cgroups;
mod chat;
mod chat_templates;
mod chat_tools;
mod clients;
mod clock_jumps;
mod compatibility;
mod crash_reports;
mod dashboards;
mod deployment;
mod device_monitor;
mod device_quarantine;
mod devices;
mod documents;
mod double_death;
mod embeddings;
mod exact;
mod failed_models;
mod faults;
mod fill_in_middle;
mod fleet_commands;
mod fuzzed_frames;
mod golden;
mod gpu;
mod hanging_mount;
mod harness;
mod hostile_clients;
mod hostile_returns;
mod http;
mod idle_clock;
mod idle_models;
mod json_output;
mod kv_types;
mod logs;
mod model_sampling;
mod model_text;
mod models_directory;
mod mps;
mod one_copy;
mod one_copy_per_device;
mod open_files;
mod other_apis;
mod prefix_routing;
mod process_limits;
mod quarantine;
mod reload;
mod router_instructions;
mod router_memory;
mod router_restart;
mod routing;
mod run_command;
mod rust_client;
mod shared_weights;
mod shell_files;
mod slow_readers;
mod soak;
mod storms;
mod structured;
mod succession;
mod supervision;
mod swap;
mod systemd;
mod systemd_split;
mod takeover;
mod tls;
mod tools;
mod top;
mod traces;
mod ui;
mod unload;
mod unusable_directory;
mod usage_log;
mod worker_wait;
mod workspace;
