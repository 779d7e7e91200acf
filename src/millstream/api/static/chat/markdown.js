// Markdown as it arrives: new text only ever adds to the page, and nothing is drawn twice.
//
// The parser (streaming-markdown) calls for elements and text; here both are made as DOM nodes, and
// no string is ever parsed as HTML, so that what a model writes cannot become markup or run.

import * as smd from "../vendor/streaming-markdown/smd.js";
import { h } from "../dom.js";

const { Token, Attr } = smd;
// What the parser keeps in fixed arrays (TOKEN_ARRAY_CAP, 24): beyond it, text comes as it is.
const DEEPEST = 20;

const TAGS = {
  [Token.Blockquote]: "blockquote", [Token.Paragraph]: "p", [Token.Line_Break]: "br",
  [Token.Rule]: "hr", [Token.Heading_1]: "h1", [Token.Heading_2]: "h2", [Token.Heading_3]: "h3",
  [Token.Heading_4]: "h4", [Token.Heading_5]: "h5", [Token.Heading_6]: "h6",
  [Token.Italic_Ast]: "em", [Token.Italic_Und]: "em", [Token.Strong_Ast]: "strong",
  [Token.Strong_Und]: "strong", [Token.Strike]: "s", [Token.Code_Inline]: "code",
  [Token.Link]: "a", [Token.Raw_URL]: "a", [Token.List_Unordered]: "ul", [Token.List_Ordered]: "ol",
  [Token.List_Item]: "li", [Token.Equation_Block]: "span", [Token.Equation_Inline]: "span",
};
// Within a word they are letters of a name, as in CommonMark; the parser takes them for emphasis.
const UNDERSCORES = { [Token.Italic_Und]: "_", [Token.Strong_Und]: "__" };
const DELIMITERS = { [Token.Equation_Block]: "$$", [Token.Equation_Inline]: "$" };

/** Draws markdown into `root` piece by piece. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.nodes = [{ element: root }];
    this.plain = null;
    this.parser = smd.parser({
      data: this,
      add_token: (self, type) => self.open(type),
      end_token: (self) => self.close(),
      add_text: (self, text) => self.text(text),
      set_attr: (self, type, value) => self.attribute(type, value),
    });
  }

  /** Add some more of the text. */
  write(text) {
    if (this.plain === null && this.parser.len < DEEPEST) {
      smd.parser_write(this.parser, text);
      return;
    }
    if (this.plain === null) {
      this.end();
      this.plain = this.root.appendChild(h("p"));
      this.plain.style.whiteSpace = "pre-wrap";
    }
    this.plain.append(text);
  }

  /** No more comes. */
  end() {
    if (this.plain === null) smd.parser_end(this.parser);
  }

  get top() {
    return this.nodes.at(-1);
  }

  open(type) {
    if (type === Token.Document) return;
    if (UNDERSCORES[type] && /[\p{L}\p{N}]$/u.test(this.top.element.lastChild?.data ?? "")) {
      this.text(UNDERSCORES[type]);
      this.nodes.push({ element: this.top.element, name: UNDERSCORES[type] });
      return;
    }
    this.nodes.push({ element: this.make(type), type });
    if (DELIMITERS[type]) this.top.element.append(DELIMITERS[type]);
  }

  make(type) {
    const parent = this.top.element;
    switch (type) {
      case Token.Code_Block:
      case Token.Code_Fence: {
        const code = h("code");
        parent.append(
          h("div", { class: "fence" },
            h("div", { class: "bar" }, h("span", { class: "lang" }),
              h("button", { type: "button", class: "plain copy" }, "Copy")),
            h("pre", { tabindex: "0" }, code)),
        );
        return code;
      }
      case Token.Image: // a picture's address would be asked for: a way out for what was said here
        return parent.appendChild(h("a"));
      case Token.Checkbox:
        return parent.appendChild(
          h("input", { type: "checkbox", disabled: true, "aria-label": "done" }));
      case Token.Table: {
        const table = h("table");
        parent.append(h("div", { class: "wide", tabindex: "0" }, table));
        return table;
      }
      case Token.Table_Row: {
        const part = parent.tHead ? (parent.tBodies[0] ?? parent.createTBody()) : parent.createTHead();
        return part.appendChild(h("tr"));
      }
      case Token.Table_Cell:
        return parent.appendChild(h(parent.parentElement.tagName === "THEAD" ? "th" : "td"));
      default:
        return parent.appendChild(h(TAGS[type] ?? "span"));
    }
  }

  close() {
    const { element, type, name } = this.nodes.pop();
    if (name && this.parser.pending.startsWith("_")) this.text(name); // else the paragraph ended first
    if (DELIMITERS[type]) element.append(DELIMITERS[type]);
  }

  text(text) {
    const { element } = this.top;
    const last = element.lastChild;
    if (last?.nodeType === Node.TEXT_NODE) last.appendData(text);
    else element.append(text);
  }

  attribute(type, value) {
    const { element } = this.top;
    switch (type) {
      case Attr.Href:
      case Attr.Src:
        if (/^(https?:\/\/|mailto:)/i.test(value.trim())) {
          element.setAttribute("href", value.trim());
          element.setAttribute("rel", "noopener noreferrer nofollow");
          element.setAttribute("target", "_blank");
        }
        break;
      case Attr.Lang:
        element.closest(".fence").querySelector(".lang").textContent = value;
        break;
      case Attr.Checked:
        element.checked = true;
        break;
      case Attr.Start:
        element.setAttribute("start", String(parseInt(value, 10) || 1));
        break;
    }
  }
}
