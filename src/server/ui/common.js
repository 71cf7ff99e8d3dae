// Language and theme, the same on both pages. What the user chose is kept in the browser; where that is not allowed it
// lasts as long as the page.
const WORDS = {
  zh: {
    "Chat": "聊天", "Dashboard": "仪表盘", "Settings": "设置", "New chat": "新对话", "Send": "发送", "Stop": "停止", "Light / dark": "浅色 / 深色",
    "Ask something": "输入问题", "Model": "模型", "System message": "系统消息", "Temperature": "温度", "Most tokens of an answer": "回答的最大词元数",
    "Seed (empty: random)": "随机种子（空：随机）", "the model's": "模型默认", "Copy": "复制", "Copied": "已复制", "Again": "重新生成", "Thinking": "思考过程",
    "stopped": "已停止", "cut off at the limit": "达到长度上限", "tokens": "词元", "to the first token": "首词元延迟", "The server cannot be reached": "无法连接服务器",
    "Enter sends, Shift+Enter begins a new line.": "回车发送，Shift+回车换行。", "The answer broke off": "回答中断",
    "Speed": "速度", "answers": "生成", "prompts": "提示词", "Time to the first token": "首词元延迟", "Between tokens": "词元间隔", "Requests": "请求", "running": "运行中",
    "waiting": "等待中", "Keys and values in use": "KV 缓存占用", "used": "已用", "Prefix cache": "前缀缓存", "hits": "命中率", "Expert load": "专家负载",
    "Memory": "内存", "half": "中位数", "1 in 20 above": "95 分位", "no requests yet": "暂无请求", "layer": "层", "expert": "专家",
    "each row a layer, each column an expert; darker is more": "每行一层，每列一个专家；颜色越深负载越高", "up": "已运行",
  },
};

const memory = {};
function remember(key, value) {
  memory[key] = value;
  try { localStorage.setItem("metainfer." + key, value); } catch { /* not allowed: this page only */ }
}
function remembered(key) {
  try { return localStorage.getItem("metainfer." + key) ?? memory[key]; } catch { return memory[key]; }
}

let language = remembered("language") || (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
function say(text) { return WORDS[language]?.[text] ?? text; }

// <b data-say="Send"> gets its text, <input data-say-placeholder="..."> its placeholder; English is the key.
function translate() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const e of document.querySelectorAll("[data-say]")) e.textContent = say(e.dataset.say);
  for (const e of document.querySelectorAll("[data-say-placeholder]")) e.placeholder = say(e.dataset.sayPlaceholder);
  const button = document.getElementById("language");
  if (button) button.textContent = language === "zh" ? "English" : "中文";
  document.dispatchEvent(new Event("language"));
}

// An address of this server. The page's own may hold a name and a password, which fetch() refuses.
const at = (path) => location.origin + path;

function set_theme(theme) { document.documentElement.dataset.theme = theme; }

function make(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.append(...children);
  return e;
}

const prefers_dark = matchMedia("(prefers-color-scheme: dark)");
set_theme(remembered("theme") || (prefers_dark.matches ? "dark" : "light"));
prefers_dark.addEventListener("change", () => { if (!remembered("theme")) set_theme(prefers_dark.matches ? "dark" : "light"); });

document.addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    remember("theme", theme);
    set_theme(theme);
  });
  document.getElementById("language").addEventListener("click", () => {
    language = language === "zh" ? "en" : "zh";
    remember("language", language);
    translate();
  });
  translate();
});
