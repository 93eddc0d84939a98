// SPDX-License-Identifier: Apache-2.0

//! The page at `/ui`: files that are part of the executable. They load nothing from elsewhere, and
//! the browser is told to refuse what would.

use std::sync::LazyLock;

use axum::extract::Path;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderMap, HeaderName, IF_NONE_MATCH,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};

use super::error::ApiError;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// The page loads only files and API of this router. It shows the output of models, which must
/// never become a script, a style or a request.
const SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'";

const INDEX: &str = "index.html";

macro_rules! page_file {
    ($name:literal, $content_type:ident) => {
        PageFile { name: $name, content_type: $content_type, text: include_str!(concat!("../../ui/", $name)) }
    };
}

static FILES: [PageFile; 14] = [
    page_file!("index.html", HTML),
    page_file!("style.css", CSS),
    page_file!("chat.css", CSS),
    page_file!("fleet.css", CSS),
    page_file!("main.js", JAVASCRIPT),
    page_file!("api.js", JAVASCRIPT),
    page_file!("chat.js", JAVASCRIPT),
    page_file!("answer.js", JAVASCRIPT),
    page_file!("tokens.js", JAVASCRIPT),
    page_file!("fleet.js", JAVASCRIPT),
    page_file!("picture.js", JAVASCRIPT),
    page_file!("ledger.js", JAVASCRIPT),
    page_file!("plots.js", JAVASCRIPT),
    page_file!("elements.js", JAVASCRIPT),
];

/// One for all files, which change together: a browser never joins files of two releases.
static TAG: LazyLock<String> = LazyLock::new(|| {
    let mut hasher = blake3::Hasher::new();
    for file in &FILES {
        hasher.update(file.text.as_bytes());
    }
    format!("\"{}\"", &hasher.finalize().to_hex()[..32])
});

struct PageFile {
    name: &'static str,
    content_type: &'static str,
    text: &'static str,
}

/// Whether the path is that of a file of the page.
pub(crate) fn is_page_file(path: &str) -> bool {
    let Some(rest) = path.strip_prefix("/ui") else { return false };
    let name = rest.strip_prefix('/').unwrap_or_default();
    rest.is_empty() || FILES.iter().any(|file| file.name == name)
}

pub(super) async fn index(headers: HeaderMap, uri: Uri) -> Response {
    file(Path(INDEX.to_owned()), headers, uri).await
}

pub(super) async fn file(Path(name): Path<String>, headers: HeaderMap, uri: Uri) -> Response {
    let Some(file) = FILES.iter().find(|file| file.name == name) else {
        return ApiError::unknown_route("GET", uri.path()).into_response();
    };
    let fixed: [(HeaderName, &str); 6] = [
        (CONTENT_TYPE, file.content_type),
        (CACHE_CONTROL, "no-cache"),
        (ETAG, &TAG),
        (CONTENT_SECURITY_POLICY, SECURITY_POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
    ];
    match has_tag(&headers) {
        true => (StatusCode::NOT_MODIFIED, fixed).into_response(),
        false => (fixed, file.text).into_response(),
    }
}

/// Whether the browser has this release's files.
fn has_tag(headers: &HeaderMap) -> bool {
    let tags = headers.get(IF_NONE_MATCH).and_then(|value| value.to_str().ok()).unwrap_or_default();
    tags.split(',').any(|tag| tag.trim().trim_start_matches("W/") == *TAG)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the page adds to the executable, in bytes.
    const BYTES_MAX: usize = 100_000;

    #[test]
    fn the_page_is_small_and_names_no_other_site() {
        let bytes: usize = FILES.iter().map(|file| file.text.len()).sum();
        assert!(bytes < BYTES_MAX, "{bytes} bytes");
        for file in &FILES {
            let is_inline = file.text.contains(" style=\"") || file.text.contains("innerHTML");
            assert!(!file.text.contains("://") && !is_inline, "{}", file.name);
        }
    }

    #[test]
    fn only_files_of_the_page_are_open() {
        for open in ["/ui", "/ui/main.js", "/ui/index.html"] {
            assert!(is_page_file(open), "{open}");
        }
        for closed in ["/ui/fleet", "/ui/other.js", "/uimain.js", "/", "/ui/main.js/x", "/v1/models"] {
            assert!(!is_page_file(closed), "{closed}");
        }
    }
}
