// SPDX-License-Identifier: Apache-2.0

//! Hidden states and labels, which requests for embeddings and scores get instead of logits.

use anyhow::Result;
use models::Pooling;
use models::testing::{Golden, state_rows, tree_data, with_classifier};
use ops::Reference;

#[test]
fn labels_are_the_classifiers_product_with_the_hidden_state() -> Result<()> {
    let ids: Vec<u32> = (0..23).map(|place| place * 7 % 200).collect();
    for golden in Golden::all(&tree_data(), &["llama", "qwen3", "gemma3"])? {
        let width = golden.file()?.description()?.embedding_length;
        let file = with_classifier(&golden.file()?, width)?;
        assert_eq!(file.description()?.pooling, Some(Pooling::Rank));
        let rows = state_rows(&file, Reference::new, &ids)?;
        for (state, labels) in rows.states.iter().zip(&rows.labels) {
            for (label, &found) in labels.iter().enumerate() {
                let row = (label * width..).take(width).map(|index| (index * 37 % 101) as f32 / 100.0 - 0.5);
                let expected: f32 = state.iter().zip(row).map(|(state, row)| state * row).sum();
                let scale: f32 = state.iter().map(|state| state.abs()).sum();
                assert!((found - expected).abs() <= 1e-5 * scale, "{}: {found}, {expected}", golden.name);
            }
        }
    }
    Ok(())
}

#[test]
fn a_file_with_rank_pooling_needs_its_classifier() -> Result<()> {
    let golden = Golden::all(&tree_data(), &["qwen3"])?.remove(0);
    let width = golden.file()?.description()?.embedding_length;
    assert_eq!(golden.file()?.description()?.pooling, None);
    let error = with_classifier(&golden.file()?, width - 1)?.description().expect_err("a wrong shape");
    assert!(format!("{error:#}").contains("tensor cls.output.weight has shape"), "{error:#}");
    Ok(())
}
