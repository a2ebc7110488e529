//! ListObjectsV2 over sorted keys: prefixes, delimiters, pages, escaping. Deliberately does not know the source of the keys.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::{CommonPrefix, EncodingType, ListObjectsV2Input, ListObjectsV2Output, Object};

const ESCAPED_IN_KEYS: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'/').remove(b'*');

/// An item of a listing before the division into pages.
pub(crate) enum ListedItem {
    Object(Box<Object>),
    Prefix(String),
}

/// Escapes a name as AWS does under `encoding-type=url`.
fn escape_name(name: &str) -> String {
    utf8_percent_encode(name, ESCAPED_IN_KEYS).to_string().replace("%20", "+")
}

/// The start of a page: the larger of the token and `start-after`.
pub(crate) fn page_start(input: &ListObjectsV2Input) -> Option<String> {
    input.continuation_token.clone().max(input.start_after.clone())
}

/// Greatest number of items of a page.
pub(crate) fn page_limit(input: &ListObjectsV2Input) -> usize {
    usize::try_from(input.max_keys.unwrap_or(1000)).unwrap_or(0).min(1000)
}

/// Builds the answer of a page; `last` is the last key or prefix when there is more.
pub(crate) fn page_output(
    input: ListObjectsV2Input,
    items: Vec<ListedItem>,
    last: Option<String>,
) -> ListObjectsV2Output {
    let url = input.encoding_type.as_ref().is_some_and(|e| e.as_str() == EncodingType::URL);
    let name = |n: String| if url { escape_name(&n) } else { n };
    let mut contents = Vec::new();
    let mut common_prefixes = Vec::new();
    let count = items.len();
    for item in items {
        match item {
            ListedItem::Object(mut object) => {
                object.key = object.key.map(name);
                contents.push(*object);
            }
            ListedItem::Prefix(prefix) => common_prefixes.push(CommonPrefix { prefix: Some(name(prefix)) }),
        }
    }
    ListObjectsV2Output {
        key_count: i32::try_from(count).ok(),
        max_keys: input.max_keys.or(Some(1000)),
        is_truncated: Some(last.is_some()),
        next_continuation_token: last,
        contents: Some(contents),
        common_prefixes: Some(common_prefixes),
        delimiter: input.delimiter,
        encoding_type: input.encoding_type,
        name: Some(input.bucket),
        prefix: input.prefix.map(name),
        start_after: input.start_after,
        ..Default::default()
    }
}
