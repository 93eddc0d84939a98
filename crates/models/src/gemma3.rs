// SPDX-License-Identifier: Apache-2.0

//! Architecture `gemma3`.
//!
//! - Rope pairs the halves of a head. Layers with an attention window use another rope base.
//! - Query and key heads are normalized, and so is the output of each block.
//! - The activation is GELU. Embeddings are scaled by the square root of their length.
//! - Most layers have an attention window; by default every sixth layer has full attention.
//! - The norm weights of a file include the 1 that Gemma adds to them.

use crate::{
    ModelConfigError,
    config::{CONTEXT_MAX, LAYERS_MAX, MetadataKeys},
    decoder::DecoderConfig,
};
use ops::{Activation, AttentionSpan, RopePairing};

/// Layers of the 27B model, which scales scores by the root of `embedding / heads` instead of the
/// head size.
const LAYERS_OF_27B: usize = 62;
/// Default period of layers with full attention.
const PERIOD: usize = 6;

pub(crate) fn configure(keys: &MetadataKeys<'_>) -> Result<DecoderConfig, ModelConfigError> {
    let config = keys.decoder(RopePairing::Halves)?;
    // Logit soft-capping is not implemented. No published model uses it, and a file that sets it is
    // refused.
    keys.number("final_logit_softcapping", 0.0..=0.0)?;
    let (mut attention_spans, mut window_rope) = (config.attention_spans, None);
    let tokens = keys.count_or("attention.sliding_window", 0, 0..=CONTEXT_MAX)?;
    if tokens > 0 {
        window_rope = Some(config.rope.of_windows(keys)?);
        for (span, windowed) in attention_spans.iter_mut().zip(windowed_layers(keys, config.layers)?) {
            *span = if windowed { AttentionSpan::Window { tokens } } else { AttentionSpan::Full };
        }
    }
    let attention_scale = match config.layers {
        LAYERS_OF_27B => 1.0 / ((config.embedding / config.heads) as f32).sqrt(),
        _ => config.attention_scale,
    };
    Ok(DecoderConfig {
        activation: Activation::GeluTanh,
        head_norms: true,
        post_norms: true,
        embedding_scale: Some((config.embedding as f32).sqrt()),
        attention_scale,
        window_rope,
        attention_spans,
        ..config
    })
}

/// Which layers have a window. A file has one flag per layer, or the period of layers with full
/// attention; with period 0 all layers have a window.
fn windowed_layers(keys: &MetadataKeys<'_>, layers: usize) -> Result<Vec<bool>, ModelConfigError> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    if let Some(flags) = keys.flags(PATTERN, layers)? {
        return Ok(flags);
    }
    let period = keys.count_or(PATTERN, PERIOD, 0..=LAYERS_MAX)?;
    Ok((0..layers).map(|layer| period == 0 || layer % period + 1 < period).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gguf::{Metadata, MetadataBuilder, ToValue, WriteError};

    /// Configures gemma3 from the metadata keys of the golden model and those that `more` adds.
    fn with(
        layers: u32,
        more: impl FnOnce(&mut MetadataBuilder) -> Result<(), WriteError>,
    ) -> Result<DecoderConfig, ModelConfigError> {
        let mut builder = MetadataBuilder::default();
        let mut put = |key: &str, value: u32| builder.put(&format!("gemma3.{key}"), value).unwrap();
        put("vocab_size", 256);
        put("context_length", 4096);
        put("embedding_length", 96);
        put("block_count", layers);
        put("feed_forward_length", 96);
        put("attention.head_count", 2);
        put("attention.head_count_kv", 1);
        put("attention.key_length", 64);
        put("attention.value_length", 64);
        builder.put("general.architecture", "gemma3").unwrap();
        builder.put("gemma3.attention.layer_norm_rms_epsilon", 1e-6_f32).unwrap();
        builder.put("gemma3.rope.freq_base", 1e6_f32).unwrap();
        builder.put("gemma3.rope.scaling.factor", 8.0_f32).unwrap();
        more(&mut builder).unwrap();
        let metadata = Metadata::parse(builder.bytes().to_vec()).unwrap();
        configure(&MetadataKeys::new(&metadata).unwrap())
    }

    fn attention_spans(
        layers: u32,
        pattern: Option<impl ToValue>,
    ) -> Result<Vec<AttentionSpan>, ModelConfigError> {
        let config = with(layers, |builder| {
            builder.put("gemma3.attention.sliding_window", 16_u32)?;
            pattern.map_or(Ok(()), |pattern| builder.put("gemma3.attention.sliding_window_pattern", pattern))
        })?;
        Ok(config.attention_spans)
    }

    #[test]
    fn every_sixth_layer_sees_all_unless_the_file_says_otherwise() {
        let [w, all] = [AttentionSpan::Window { tokens: 16 }, AttentionSpan::Full];
        assert_eq!(attention_spans(8, None::<u32>).unwrap(), [w, w, w, w, w, all, w, w]);
        assert_eq!(attention_spans(5, Some(2_u32)).unwrap(), [w, all, w, all, w]);
        assert_eq!(attention_spans(2, Some(1_u32)).unwrap(), [all; 2]);
        assert_eq!(attention_spans(2, Some(0_u32)).unwrap(), [w; 2]);
        assert_eq!(attention_spans(3, Some(&[false, true, true][..])).unwrap(), [all, w, w]);
        assert_eq!(attention_spans(3, Some(&[0_u32, 1, 0][..])).unwrap(), [all, w, all]);
        let refused = attention_spans(3, Some(&[true, true][..])).unwrap_err().to_string();
        assert_eq!(refused, "key gemma3.attention.sliding_window_pattern has 2 values, but 3 are needed");
        assert!(attention_spans(3, Some("all")).is_err());
    }

    #[test]
    fn without_a_window_all_layers_see_all() {
        let zero = with(6, |builder| builder.put("gemma3.attention.sliding_window", 0_u32));
        for config in [with(6, |_| Ok(())).unwrap(), zero.unwrap()] {
            assert_eq!((config.attention_spans, config.window_rope), (vec![AttentionSpan::Full; 6], None));
        }
    }

    #[test]
    fn windowed_layers_turn_by_a_base_of_their_own_and_unscaled() {
        let turns = |base: Option<f32>| {
            let config = with(6, |builder| {
                builder.put("gemma3.attention.sliding_window", 16_u32)?;
                base.map_or(Ok(()), |base| builder.put("gemma3.rope.freq_base_swa", base))
            });
            let config = config.unwrap();
            let of = |rope: &crate::rope::RopeConfig| rope.spec(None).inverse_frequencies;
            (of(&config.rope), of(&config.window_rope.unwrap()))
        };
        let (full, window) = turns(None);
        assert_eq!((full[0], window[0]), (0.125, 1.0));
        // The inverse frequency of the middle pair is 1 / sqrt(base). In full layers it is also
        // divided by the factor 8.
        assert!((full[16] - 0.125e-3).abs() < 1e-9 && (window[16] - 1e-2).abs() < 1e-8);
        let (same, window) = turns(Some(1e4 / 4.0));
        assert_eq!(same, full);
        assert!((window[16] - 2e-2).abs() < 1e-8, "{}", window[16]);
    }

    #[test]
    fn scores_of_27b_are_divided_by_another_root() {
        let scale = |layers| with(layers, |_| Ok(())).unwrap().attention_scale;
        assert_eq!(scale(26), 1.0 / 8.0);
        assert_eq!(scale(62), 1.0 / 48.0_f32.sqrt());
    }

    #[test]
    fn a_cap_of_the_logits_is_refused_by_name() {
        const CAP: &str = "gemma3.final_logit_softcapping";
        assert!(with(2, |builder| builder.put(CAP, 0.0_f32)).is_ok());
        let error = with(2, |builder| builder.put(CAP, 30.0_f32)).unwrap_err();
        assert_eq!(error.to_string(), format!("key {CAP} is 30, outside 0 to 0"));
    }
}
