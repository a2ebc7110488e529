//! JSON as written: keys in order, and repeated keys kept. Knows no key.

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub enum JsonNode {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Integer(i64),
    /// Another number, as text.
    Float(f64),
    Text(String),
    Array(Vec<JsonNode>),
    /// An object, with the keys in order.
    Object(Vec<(String, JsonNode)>),
}

impl JsonNode {
    /// The kind of value, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            JsonNode::Null => "null",
            JsonNode::Bool(_) => "true or false",
            JsonNode::Integer(_) => "a number",
            JsonNode::Float(_) => "a number with a fraction or an exponent",
            JsonNode::Text(_) => "a string",
            JsonNode::Array(_) => "a list",
            JsonNode::Object(_) => "an object",
        }
    }
}

impl<'de> Deserialize<'de> for JsonNode {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = JsonNode;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<JsonNode, E> {
        Ok(JsonNode::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<JsonNode, E> {
        Ok(JsonNode::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<JsonNode, E> {
        Ok(JsonNode::Integer(value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<JsonNode, E> {
        i64::try_from(value).map(JsonNode::Integer).map_err(|_| E::custom(format!("the number {value} is too large")))
    }

    fn visit_f64<E>(self, value: f64) -> Result<JsonNode, E> {
        Ok(JsonNode::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<JsonNode, E> {
        Ok(JsonNode::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<JsonNode, A::Error> {
        let mut all = Vec::new();
        while let Some(item) = items.next_element()? {
            all.push(item);
        }
        Ok(JsonNode::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<JsonNode, A::Error> {
        let mut all = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            all.push(entry);
            // A configuration has a dozen keys; a hostile file must not grow without bound.
            if all.len() > 10_000 {
                return Err(A::Error::custom("an object with more than 10000 keys"));
            }
        }
        Ok(JsonNode::Object(all))
    }
}
