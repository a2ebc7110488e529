//! ListObjectsV2 over sorted keys: prefixes, delimiters, pages, escaping.
//! It deliberately knows nothing of where the keys come from.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::{CommonPrefix, EncodingType, ListObjectsV2Input, ListObjectsV2Output, Object};

const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'/').remove(b'*');

/// One thing of a listing before it is cut into pages.
pub(crate) enum Item {
    Object(Box<Object>),
    Prefix(String),
}

/// What AWS does to a name under `encoding-type=url`.
fn escape(name: &str) -> String {
    utf8_percent_encode(name, ESCAPED).to_string().replace("%20", "+")
}

/// Where a page starts: the larger of the token and `start-after`.
pub(crate) fn start(input: &ListObjectsV2Input) -> Option<String> {
    input.continuation_token.clone().max(input.start_after.clone())
}

/// The number of things a page may hold.
pub(crate) fn limit(input: &ListObjectsV2Input) -> usize {
    usize::try_from(input.max_keys.unwrap_or(1000)).unwrap_or(0).min(1000)
}

/// Makes the answer of one page; `last` is the key or prefix it ends with when there is more.
pub(crate) fn output(input: ListObjectsV2Input, items: Vec<Item>, last: Option<String>) -> ListObjectsV2Output {
    let url = input.encoding_type.as_ref().is_some_and(|e| e.as_str() == EncodingType::URL);
    let name = |n: String| if url { escape(&n) } else { n };
    let (mut contents, mut common_prefixes) = (Vec::new(), Vec::new());
    let count = items.len();
    for item in items {
        match item {
            Item::Object(mut object) => {
                object.key = object.key.map(name);
                contents.push(*object);
            }
            Item::Prefix(prefix) => common_prefixes.push(CommonPrefix { prefix: Some(name(prefix)) }),
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
