import { defineConfig } from 'vite';

export default defineConfig({
  base: './',
  esbuild: { jsx: 'automatic' },
  define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}', global: 'globalThis' },
  build: { target: 'es2022', minify: false, chunkSizeWarningLimit: 100000, rollupOptions: { shimMissingExports: true } },
});
