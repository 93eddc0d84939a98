// SPDX-License-Identifier: Apache-2.0

//! The first two requests to a server: whether it answers, and how its tokenizer counts.

use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use tokio::time::Instant;

use super::answer::RequestFailure;
use super::client::{ServerError, ServingClient};
use super::prose::{CountedPrompt, TokenScale, write_words};
use super::target::RequestTemplate;

/// Bytes of the two prompts. Texts of 200 words differ by some percent in their tokens.
const SHORT_BYTES: usize = 60;
const LONG_BYTES: usize = 1200;

/// Asks for one token after two prompts, and compares their counts of tokens.
pub async fn measure_token_scale(
    client: &ServingClient,
    template: &RequestTemplate,
    context_tokens: Option<u32>,
) -> Result<TokenScale, ServerError> {
    // A token has a byte or more, so that half as many bytes leave room for a chat template.
    let fitting = context_tokens.map_or(LONG_BYTES, |tokens| tokens as usize / 2);
    let short = count(client, template, SHORT_BYTES).await?;
    let long = count(client, template, LONG_BYTES.min(fitting)).await?;
    Ok(TokenScale::through(short, long).unwrap_or(TokenScale::TYPICAL))
}

async fn count(
    client: &ServingClient,
    template: &RequestTemplate,
    bytes: usize,
) -> Result<CountedPrompt, ServerError> {
    let prompt = write_words(&mut Xoshiro256PlusPlus::seed_from_u64(bytes as u64), bytes);
    let request = client.request(template, &[], &prompt, 1);
    let answer = client.stream(request, Instant::now()).await;
    let url = client.base_url().to_owned();
    let answer = answer.map_err(|failure| match failure {
        // Some servers show their models without a key.
        RequestFailure::Status { status: status @ (401 | 403), .. } => {
            ServerError::Unauthorized { url, status }
        }
        failure => ServerError::FirstRequest { url, failure },
    })?;
    Ok(CountedPrompt { bytes: prompt.len(), tokens: answer.prompt_tokens })
}
